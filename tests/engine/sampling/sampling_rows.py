"""Rows to sample, without an engine around them."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import torch

from millrace.engine.kernels.random_stream import stream_key
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineRequest
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.sampling import SamplingParams

VOCAB_SIZE = 150  # no multiple of the sampler's groups


class Row(Sequence):
    """Sequence that may claim a later place in its random stream than its number of tokens."""

    index: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return super().num_output_tokens if self.index is None else self.index


def row(
    index: int | None = None,
    seed: int = 1,
    prompt: Rows[int] = (0,),
    output: Rows[int] = (),
    eos: Rows[int] = (),
    **params: Any,
) -> Row:
    """Return a sequence with ``prompt`` and ``output``, at token ``index`` of its stream."""
    made = Row(
        EngineRequest(
            request_id="r",
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(output),
            eos_token_ids=tuple(eos),
            sampling=SamplingParams(**params),
        ),
        arrival=0,
        key=stream_key(seed),
        max_total_tokens=1 << 30,
    )
    made.index = index
    return made


class Drawn(NamedTuple):
    """Drawn tokens: ``token_ids[i]`` is None if row i has none, for the reason ``errors[i]``."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    errors: list[MillraceError | None]


def sample(logits: torch.Tensor, rows: Rows[Sequence], masks: torch.Tensor | None = None) -> Drawn:
    """Sample one token a row by a new sampler; ``logits``: [num_rows, vocab_size]."""
    sampler = Sampler(logits.shape[1], logits.device)
    for sequence in rows:
        sampler.add(sequence)
    outcomes, logprobs = sampler.sample(rows, logits, masks)
    return Drawn(
        [None if isinstance(outcome, MillraceError) else outcome for outcome in outcomes],
        logprobs,
        [outcome if isinstance(outcome, MillraceError) else None for outcome in outcomes],
    )


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Draw standard normal logits, times 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2
