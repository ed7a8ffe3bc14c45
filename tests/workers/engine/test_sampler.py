"""What is drawn: the right distribution, the same draw in any company."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from schemas.sampling import SamplingParams
from tests.workers.engine.sampling_rows import VOCAB_SIZE, random_logits, row, sample
from workers.engine.random_stream import stream_key, uniforms


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The plain definition, one row, everything sorted."""
    probs = (logits.double() / params.temperature).softmax(-1)
    if params.top_k:
        probs[probs < probs.sort(descending=True).values[params.top_k - 1]] = 0
        probs /= probs.sum()
    ordered, ids = probs.sort(descending=True)
    outside = ordered.cumsum(0) - ordered >= params.top_p
    probs[ids[outside]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def chi_square_limit(degrees: int) -> float:
    """Wilson and Hilferty's approximation of the 99.9 % quantile."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws = 20_000
    logits = random_logits(1)
    expected = expected_distribution(logits[0], SamplingParams(**params))
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for start in range(0, num_draws, 2_000):
        rows = [row(index=start + i, **params) for i in range(2_000)]
        tokens = sample(logits.expand(2_000, -1), rows).token_ids
        counts += torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    common = expected * num_draws >= 5
    rest = float(expected[~common].sum()) * num_draws
    statistic = float(((counts - expected * num_draws) ** 2 / (expected * num_draws))[common].sum())
    if rest >= 5:
        statistic += (float(counts[~common].sum()) - rest) ** 2 / rest
    assert statistic <= chi_square_limit(int(common.sum()))


def test_seeds_are_as_good_as_indices() -> None:
    keys = torch.tensor([stream_key(seed) for seed in range(20_000)])
    draws = uniforms(keys, torch.zeros_like(keys), 3)
    assert float(draws.min()) > 0
    assert float(draws.max()) < 1
    for lane in range(3):
        counts = torch.histc(draws[:, lane], 50, 0, 1)
        assert float(((counts - 400) ** 2 / 400).sum()) <= chi_square_limit(49)
    assert float(torch.corrcoef(draws.T).fill_diagonal_(0).abs().max()) < 0.03


def test_the_stream_is_what_it_always_was() -> None:
    keys = torch.tensor([stream_key(0), stream_key(2**63 - 1)])
    known = [[splitmix_uniform(seed, 5, lane) for lane in range(4)] for seed in (0, 2**63 - 1)]
    assert uniforms(keys, torch.tensor([5, 5]), 4).tolist() == known


def splitmix_uniform(seed: int, index: int, lane: int) -> float:
    """The same stream in Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) % 2**64)
    counter = mix((key + (index + 1) * golden) % 2**64)
    return ((mix((counter + (lane + 1) * golden) % 2**64) >> 12) + 0.5) / 2**52


def mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
    return bits ^ (bits >> 31)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(24)
    rows = [
        row(
            index=i * 3,
            seed=i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9, 0.99, 0.5)[i % 4],
            min_p=(0.0, 0.05)[i % 2],
        )
        for i in range(24)
    ]
    together = sample(logits, rows).token_ids
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(24)]
    assert together == alone
    order = list(range(23, -1, -1))
    shuffled = sample(logits[order], [rows[i] for i in order]).token_ids
    assert [shuffled[i] for i in order] == together


def test_rounding_noise_hardly_ever_changes_a_draw() -> None:
    num_rows = 4_000
    logits = random_logits(1, vocab_size=4096).expand(num_rows, -1)
    noise = random_logits(num_rows, seed=1, vocab_size=4096) * 1e-5
    rows = [row(index=i, temperature=1.5) for i in range(num_rows)]
    before = sample(logits, rows).token_ids
    after = sample(logits + noise, rows).token_ids
    assert sum(x != y for x, y in zip(before, after, strict=True)) <= 2


def test_greedy_is_argmax_for_any_vocabulary() -> None:
    for vocab_size in (1, 63, 64, 65, 1000):
        logits = random_logits(8, seed=vocab_size, vocab_size=vocab_size)
        tokens = sample(logits, [row(temperature=0.0)] * 8).token_ids
        assert tokens == logits.argmax(-1).tolist()


def test_one_token_stays_when_everything_is_cut() -> None:
    logits = random_logits(6)
    rows = [
        row(top_k=1),
        row(top_p=1e-9),
        row(min_p=1.0),
        row(top_k=1, top_p=0.1, min_p=0.5),
        row(temperature=1e-6),
        row(top_k=10_000),
    ]
    tokens = sample(logits, rows).token_ids
    assert tokens[:5] == logits.argmax(-1).tolist()[:5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_give_no_token(value: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 17] = value
    rows = [row(temperature=temperature, logprobs=1, top_p=0.9)] * 3
    tokens, logprobs, _ = sample(logits, rows)
    assert tokens[1] is None
    assert logprobs[1] is None
    assert isinstance(tokens[0], int)
    assert isinstance(tokens[2], int)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, VOCAB_SIZE), float("-inf"))
    logits[:, [3, 77, 149]] = 0.0
    tokens = sample(logits, [row(index=i) for i in range(500)]).token_ids
    assert set(tokens) == {3, 77, 149}
