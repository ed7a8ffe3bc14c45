"""Sampling by a ``DeviceSampler``, without an engine around it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import hypothesis.strategies as st
import pytest
import torch

from millrace.engine.devices.cuda.sampler import DeviceSampler
from millrace.engine.kernels.gpu import sampling as kernels
from millrace.engine.kernels.gpu.sampling import SamplingTiles
from tests.engine.sampling.sampling_rows import Row, row

CPU = torch.device("cpu")
POISON = -99
# So small that narrowing looks beyond the likeliest groups, and reads what it lists in turns.
SMALL_TILES = SamplingTiles(
    summary_groups=2, part_groups=1, likeliest_groups=2, pass_groups=2, capacity=16
)


def begun(sequences: Rows[Row], vocab_size: int, backend: str = "triton") -> DeviceSampler:
    """Return a sampler whose row i belongs to sequence i; an extra row is for padding."""
    sampler = DeviceSampler(vocab_size, len(sequences) + 1, CPU, kernels=backend)
    for number, sequence in enumerate(sequences):
        sampler.add(number, sequence)
    sampler.upload(torch.from_numpy)
    return sampler


def choose(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    sequences: Rows[Row],
    numbers: Rows[int] | None = None,
) -> list[int]:
    """Choose a token for each sequence, which has the row of its place or of ``numbers``."""
    rows = torch.tensor(range(len(sequences)) if numbers is None else numbers, dtype=torch.int32)
    indices = torch.tensor([sequence.num_output_tokens for sequence in sequences])
    out = torch.full((len(sequences),), POISON)
    sampler.sample(logits, rows, indices, out)
    return out.tolist()


def by_tiles(monkeypatch: pytest.MonkeyPatch, tiles: SamplingTiles) -> None:
    """Make all samplers use these tiles."""
    monkeypatch.setattr(kernels.choose_tokens, "__defaults__", (tiles,))


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    """Draw parameters that the device supports, each of them off as often as not."""

    def often(key: str, *values: float) -> st.SearchStrategy[dict[str, Any]]:
        return st.one_of(st.just({}), st.sampled_from([{key: value} for value in values]))

    options = st.tuples(
        st.sampled_from([{"temperature": t} for t in (0.0, 1e-4, 0.3, 0.7, 1.0, 2.0)]),
        often("top_k", 1, 2, 5, 30, 90, 1000),
        often("top_p", 0.02, 0.5, 0.9, 0.999, 0.9999999),
        often("min_p", 0.01, 0.2, 1.0),
        often("repetition_penalty", 0.6, 1.4),
        often("presence_penalty", -1.0, 0.7),
        often("frequency_penalty", -0.3, 0.4),
    )
    return options.map(lambda drawn: {k: v for part in drawn for k, v in part.items()})


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Row]]:
    """Draw random logits and a sequence for each row of them."""
    vocab_size = draw(st.sampled_from([50, 64, 130, 333, 700]))
    num_rows = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from([0.01, 1.0, 4.0]))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    outputs = torch.randint(vocab_size, (num_rows, 16), generator=generator).tolist()
    rows = []
    for tokens in outputs:
        half = draw(st.integers(0, 8))
        options = draw(parameters())
        seed = draw(st.integers(0, 99))
        rows.append(row(seed=seed, prompt=tokens[:half] or [0], output=tokens[half:], **options))
    return logits, rows
