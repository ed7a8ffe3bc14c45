"""Sampling on the device: it chooses the same tokens as the CPU's sampler."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.engine.kernels.gpu.device_sampling import (
    SMALL_TILES,
    batches,
    begun,
    by_tiles,
    choose,
)
from tests.engine.sampling.sampling_reference import chi_square, distribution
from tests.engine.sampling.sampling_rows import Row, random_logits, row, sample

pytestmark = [
    pytest.mark.usefixtures("poisoned_outputs"),
    # The interpreter computes with numpy, which tells of what is wanted here.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
_PROPERTY = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _wanted(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [-1 if token is None else token for token in sample(logits, rows).token_ids]


@_PROPERTY
@given(batch=batches())
def test_chooses_what_the_cpu_chooses(batch: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = batch
    before = logits.clone()
    chosen = choose(begun(rows, logits.shape[1]), logits, rows)
    assert chosen == _wanted(logits, rows)
    assert torch.equal(logits, before)


@_PROPERTY
@given(batch=batches())
def test_looks_beyond_the_likeliest_groups(
    batch: tuple[torch.Tensor, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = batch
    with monkeypatch.context() as patch:
        by_tiles(patch, SMALL_TILES)
        chosen = choose(begun(rows, logits.shape[1]), logits, rows)
    assert chosen == _wanted(logits, rows)


@settings(_PROPERTY, max_examples=60)
@given(batch=batches())
def test_the_reference_chooses_the_same(batch: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = batch
    assert choose(begun(rows, logits.shape[1], "reference"), logits, rows) == _wanted(logits, rows)


@BACKENDS
def test_rows_without_a_finite_maximum_have_no_token(backend: str) -> None:
    logits = random_logits(8)
    logits[0, 149] = nan
    logits[1, 0] = inf
    logits[2] = -inf
    logits[3, 64:128] = -inf
    logits[4, 1:] = -inf
    logits[6, 77] = nan
    rows = [row(temperature=0.0), row(), row(top_k=3), row(seed=4), row(top_p=0.5), row(top_k=3)]
    rows += [row(repetition_penalty=1.5), row(temperature=0.0)]
    chosen = choose(begun(rows, 150, backend), logits, rows)
    assert chosen == _wanted(logits, rows)
    assert [chosen[place] for place in (0, 1, 2, 6)] == [-1] * 4
    assert chosen[4] == 0


@BACKENDS
def test_ties_at_a_bound_are_all_kept(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 300), -20.0)
    tied = [3, 70, 71, 140, 299]
    logits[0, tied] = 1.0
    logits[0, 130] = 2.0
    kinds: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.5}]
    kinds += [{"min_p": 0.3}, {"top_k": 1}]
    rows = [row(index=i, **kind) for kind in kinds for i in range(20)]
    wanted = _wanted(logits.expand(len(rows), -1), rows)
    assert {*wanted[:80]} == {*tied, 130}
    if backend == "triton":
        rows, wanted = rows[::7], wanted[::7]
    assert choose(begun(rows, 300, backend), logits.expand(len(rows), -1), rows) == wanted
    if backend == "triton":
        by_tiles(monkeypatch, SMALL_TILES)
        assert choose(begun(rows, 300), logits.expand(len(rows), -1), rows) == wanted


@pytest.mark.parametrize("value", [0.0, -5.0, 1e30])
def test_all_tokens_tie(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((6, 200), value)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.3}, {"min_p": 1.0}]
    kinds += [{"top_k": 150, "top_p": 0.9}, {"temperature": 0.0}]
    rows = [row(seed=9, **kind) for kind in kinds]
    wanted = _wanted(logits, rows)
    assert choose(begun(rows, 200), logits, rows) == wanted
    by_tiles(monkeypatch, SMALL_TILES)
    assert choose(begun(rows, 200), logits, rows) == wanted


def test_gaps_may_be_tiny_or_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The range of gaps is narrowed in few passes however they are spread."""
    tiny = torch.linspace(0, 1e-30, 300)
    spread = torch.cat([-torch.logspace(-37, 37, 250), torch.linspace(-1, 0, 50)])
    kinds: list[dict[str, Any]] = [{"top_k": 250}, {"top_p": 0.8}, {"top_k": 100, "top_p": 0.5}]
    kinds += [{"temperature": 1e-6, "top_p": 0.7}]
    logits = torch.stack([tiny, spread]).repeat_interleave(len(kinds), 0)
    rows = [row(seed=5, **kind) for _ in range(2) for kind in kinds]
    by_tiles(monkeypatch, SMALL_TILES)
    assert choose(begun(rows, 300), logits, rows) == _wanted(logits, rows)


def test_the_temperature_may_be_as_small_as_a_number_can_be() -> None:
    logits = random_logits(3)
    rows = [row(temperature=1e-38), row(temperature=1e-44, top_p=0.9), row(temperature=1e-30)]
    assert choose(begun(rows, 150), logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("backend", "num_draws", "options"),
    [("triton", 80, {}), ("reference", 4000, {"top_p": 0.8})],
)
def test_draws_have_the_distribution_that_is_asked_for(
    backend: str, num_draws: int, options: dict[str, Any]
) -> None:
    logits = random_logits(1, vocab_size=20) / 2
    asked = {"temperature": 1.2, "min_p": 0.02, **options}
    rows = [row(index=index, **asked) for index in range(num_draws)]
    sampler = begun(rows[:1], 20, backend)
    chosen = choose(sampler, logits.expand(num_draws, -1), rows, [0] * num_draws)
    counts = np.bincount(chosen, minlength=20).astype(np.float64)
    expected = distribution(logits[0].double().numpy(), rows[0].request.sampling)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@BACKENDS
def test_a_token_is_the_same_in_any_company(backend: str) -> None:
    logits = random_logits(5, vocab_size=333)
    rows = [row(seed=3, index=11, top_p=0.9), row(temperature=0.0), row(top_k=4), row(seed=8)]
    rows.append(row(repetition_penalty=1.3, prompt=[5, 9]))
    together = choose(begun(rows, 333, backend), logits, rows)
    for place in range(5):
        alone = choose(begun([rows[place]], 333, backend), logits[[place]], [rows[place]])
        assert alone == [together[place]]
    order = [4, 2, 0, 3, 1]
    shuffled = [rows[place] for place in order]
    sampler = begun(rows, 333, backend)
    assert choose(sampler, logits[order], shuffled, order) == [together[place] for place in order]


@BACKENDS
def test_seed_and_index_decide_a_draw(backend: str) -> None:
    logits = random_logits(1) / 4
    rows = [row(seed=seed, index=index) for seed in (1, 2) for index in range(6)]
    first = choose(begun(rows, 150, backend), logits.expand(12, -1), rows)
    assert first == choose(begun(rows, 150, backend), logits.expand(12, -1), rows)
    assert len({*first}) > 6
    assert first[:6] != first[6:]


@BACKENDS
def test_penalties_follow_the_tokens_that_are_chosen(backend: str) -> None:
    logits = random_logits(4, vocab_size=90) / 3
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"frequency_penalty": 0.4, "top_k": 20},
        {"presence_penalty": 1.0, "repetition_penalty": 0.8},
        {},
    ]
    rows = [row(seed=i, prompt=[1, 2, 2], output=[7, 7], **kind) for i, kind in enumerate(kinds)]
    sampler = begun(rows, 90, backend)
    for _ in range(8):
        wanted = _wanted(logits, rows)
        assert choose(sampler, logits, rows) == wanted
        for sequence, token in zip(rows, wanted, strict=True):
            sequence.token_ids.append(token)
    assert len({*rows[0].token_ids}) > 5


def test_counts_stop_at_the_most_that_they_hold() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 1] = 1e6
    rows = [row(temperature=0.0, presence_penalty=0.5, output=[1] * ((1 << 15) - 2))]
    sampler = begun(rows, 3)
    for _ in range(3):
        assert choose(sampler, logits, rows) == [1]
    assert choose(begun(rows, 3, "reference"), logits, rows) == [1]


@BACKENDS
def test_padding_rows_are_harmless(backend: str) -> None:
    logits = random_logits(5)
    logits[3:] = nan
    rows = [row(frequency_penalty=0.5), row(seed=2), row(temperature=0.0)]
    padded = [*rows, row(), row()]
    chosen = choose(begun(rows, 150, backend), logits, padded, [0, 1, 2, 3, 3])
    assert chosen == [*_wanted(logits[:3], rows), -1, -1]


def test_rows_of_logits_may_lie_apart() -> None:
    logits = random_logits(6, vocab_size=200)
    rows = [row(seed=1), row(seed=2, top_p=0.6)]
    strided = logits[1::3, :150]
    assert choose(begun(rows, 150), strided, rows) == _wanted(strided, rows)


@BACKENDS
def test_no_rows_are_no_work(backend: str) -> None:
    assert choose(begun([], 150, backend), torch.empty(0, 150), []) == []
