"""Draws of the sampler: their distribution, and their batch invariance."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engine.kernels.random_stream import stream_key, uniforms, uniforms_by_torch
from millrace.engine.sampling.sampler import Sampler
from millrace.schemas.sampling import SamplingParams
from tests.engine.sampling.sampling_reference import (
    chi_square,
    chi_square_limit,
    distribution,
    processed,
)
from tests.engine.sampling.sampling_rows import VOCAB_SIZE, Row, random_logits, row, sample


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
        {"temperature": 1.0, "typical_p": 0.6},
        {"temperature": 1.3, "typical_p": 0.9, "top_k": 50, "top_p": 0.95},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.3},
        {"logit_bias": {3: 2.0, 140: -1.5, 7: -100.0}},
        {"min_tokens": 9},
        {
            "temperature": 0.9,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "frequency_penalty": -0.5,
            "logit_bias": {5: 3.0},
            "min_tokens": 7,
        },
        {
            "temperature": 1.4,
            "typical_p": 0.8,
            "min_p": 0.01,
            "presence_penalty": -0.7,
            "repetition_penalty": 0.9,
        },
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws, batch = 8_000, 1_000
    prompt, output, stops = (1, 2, 3, 3, 149), (5, 60, 60, 60, 100), (11, 12)
    logits = random_logits(1)
    sampling = SamplingParams(**params)
    changed = processed(logits[0].numpy(), sampling, prompt, output, stops)
    expected = distribution(changed, sampling)
    counts = np.zeros(VOCAB_SIZE)
    rows = [row(0, 1, prompt, output, stops, **params) for _ in range(batch)]
    sampler = Sampler(VOCAB_SIZE, logits.device)
    for start in range(0, num_draws, batch):
        for i, sequence in enumerate(rows):
            sequence.key = stream_key(start + i)
            sampler.add(sequence)
        tokens = sampler.sample(rows, logits.expand(batch, -1)).outcomes
        counts += np.bincount(np.array(tokens, dtype=np.int64), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic <= limit


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
    indices = torch.tensor([5, 5])
    assert uniforms(keys, indices, 4).tolist() == known
    assert uniforms_by_torch(keys, indices, 4).tolist() == known


def splitmix_uniform(seed: int, index: int, lane: int) -> float:
    """Compute the same stream in Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) % 2**64)
    counter = mix((key + (index + 1) * golden) % 2**64)
    return ((mix((counter + (lane + 1) * golden) % 2**64) >> 12) + 0.5) / 2**52


def mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
    return bits ^ (bits >> 31)


def mixed_rows(count: int) -> list[Row]:
    """Return rows with all options in all mixes."""
    generator = random.Random(4)
    return [
        row(
            index=i * 3,
            seed=i,
            prompt=[generator.randrange(VOCAB_SIZE) for _ in range(1 + i)],
            output=[generator.randrange(VOCAB_SIZE) for _ in range(i % 7)],
            eos=(i, 2 * i),
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9, 0.99, 0.5)[i % 4],
            min_p=(0.0, 0.05)[i // 2 % 2],
            typical_p=(1.0, 1.0, 0.8)[i // 3 % 3],
            repetition_penalty=(1.0, 1.2)[i // 4 % 2],
            presence_penalty=(0.0, 0.0, 0.5, -0.5)[i // 2 % 4],
            frequency_penalty=(0.0, 0.3)[i // 5 % 2],
            logit_bias={} if i % 5 else {i: 4.0, 149: -3.0},
            min_tokens=(0, 10**6)[i // 6 % 2],
            logprobs=(None, None, 3)[i % 3],
        )
        for i in range(count)
    ]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(32)
    rows = mixed_rows(32)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(32)]
    assert together.token_ids == [one.token_ids[0] for one in alone]
    assert together.logprobs == [one.logprobs[0] for one in alone]
    order = list(range(31, -1, -1))
    shuffled = sample(logits[order], [rows[i] for i in order]).token_ids
    assert [shuffled[i] for i in order] == together.token_ids
    assert all(token is not None for token in together.token_ids)


def test_split_of_a_batch_changes_no_draw() -> None:
    vocab_size = 40_000
    logits = random_logits(70, vocab_size=vocab_size)
    rows = [row(seed=i, temperature=i % 2, top_p=(1.0, 0.9)[i // 2 % 2]) for i in range(70)]
    sampler = Sampler(vocab_size, logits.device)
    for sequence in rows:
        sampler.add(sequence)
    together = sampler.sample(rows, logits).outcomes
    assert together == [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(70)]
    # The same sampler goes on with fewer and other rows.
    assert sampler.sample(rows[5:40], logits[5:40]).outcomes == together[5:40]
    assert sampler.sample(rows[::-1], logits.flip(0)).outcomes == together[::-1]


def test_logits_in_half_precision_stay_as_they_are() -> None:
    logits = random_logits(6).bfloat16()
    before = logits.clone()
    rows = [row(seed=i, temperature=i % 2, logit_bias={3: 100.0}) for i in range(6)]
    assert sample(logits, rows).token_ids == [3] * 6
    assert torch.equal(logits, before)
    single = logits.float()
    sample(single, rows)
    assert torch.equal(single, before.float())


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
