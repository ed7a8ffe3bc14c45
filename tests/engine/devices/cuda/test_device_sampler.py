"""Sampler of a device: its rows, its supported parameters and its results."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from millrace.engine.devices.cuda.sampler import DeviceSampler, LogprobBuffers
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from tests.engine.kernels.gpu.device_sampling import CPU, begun, choose
from tests.engine.sampling.sampling_rows import random_logits, row, sample

# The interpreter computes with numpy, which tells of what is wanted here.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])


@pytest.mark.parametrize(
    "refused",
    [
        {"grammar": Grammar(kind=GrammarKind.JSON_OBJECT)},
        {"bad_words": ("no",)},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (3,)},
        {"min_tokens": 2},
        {"typical_p": 0.5},
    ],
)
def test_says_what_it_cannot_do(refused: dict[str, Any]) -> None:
    assert not DeviceSampler.suits(SamplingParams(**refused))


def test_says_what_it_can_do() -> None:
    everything = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logprobs=5,
    )
    assert DeviceSampler.suits(everything)
    assert DeviceSampler.suits(SamplingParams(temperature=0.0))


def test_a_row_can_be_given_to_another_sequence() -> None:
    logits = random_logits(1)
    first = row(repetition_penalty=2.0, frequency_penalty=1.0, prompt=[*range(50)], output=[3, 4])
    sampler = begun([first], 150)
    choose(sampler, logits, [first])
    for other in (
        row(seed=7),
        row(frequency_penalty=0.7, prompt=[3], output=[60]),
        row(temperature=0.0),
    ):
        sampler.add(0, other)
        sampler.upload(torch.from_numpy)
        assert choose(sampler, logits, [other]) == sample(logits, [other]).token_ids


def test_the_last_that_was_begun_has_the_row() -> None:
    logits = random_logits(1)
    last = row(temperature=0.0)
    sampler = DeviceSampler(150, 2, CPU)
    sampler.add(0, row(presence_penalty=1.0, output=[1]))
    sampler.add(0, last)
    sampler.upload(torch.from_numpy)
    assert choose(sampler, logits, [last]) == [int(logits.argmax())]


def test_added_rows_are_uploaded_at_once_and_only_once() -> None:
    copies = []

    def copy(array: npt.NDArray[np.generic]) -> torch.Tensor:
        copies.append(array)
        return torch.from_numpy(array)

    sampler = DeviceSampler(150, 4, CPU)
    sampler.upload(copy)
    assert not copies
    for number in range(3):
        sampler.add(number, row(presence_penalty=0.1, output=[5, 5, 6]))
    sampler.upload(copy)
    sampler.upload(copy)
    assert len(copies) == 1


def _logprobs(
    sampler: DeviceSampler, logits: torch.Tensor, tokens: list[int], counts: dict[int, int]
) -> LogprobBuffers:
    return sampler.logprobs(
        logits, torch.tensor(tokens), list(counts), list(counts.values()), torch.from_numpy
    )


@BACKENDS
@pytest.mark.parametrize("vocab_size", [50, 150, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_model(backend: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(4, vocab_size=vocab_size).to(dtype)
    counts = [20, None, 0, 3]
    rows = [
        row(seed=i, logprobs=count, temperature=0.5, presence_penalty=1.0, output=[2])
        for i, count in enumerate(counts)
    ]
    wanted = sample(logits, rows)
    sampler = begun(rows, vocab_size, backend)
    tokens = choose(sampler, logits, rows)
    assert tokens == wanted.token_ids
    buffers = _logprobs(sampler, logits, tokens, {0: 20, 2: 0, 3: 3})
    entries = buffers.entries(buffers.values, tokens)
    for own, expected in zip(entries, wanted.logprobs, strict=True):
        if expected is None or own is None:
            assert own is expected
            continue
        assert own.token_id == expected.token_id
        assert own.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert len(own.top) == len(expected.top)
        # Of equally likely tokens, which many are in bfloat16, others may come first there.
        for (_, mine), (_, theirs) in zip(own.top, expected.top, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        if dtype is torch.float32:
            assert [token for token, _ in own.top] == [token for token, _ in expected.top]


@BACKENDS
def test_more_alternatives_than_tokens_and_forbidden_ones(backend: str) -> None:
    logits = torch.full((1, 70), -inf)
    logits[0, [66, 3, 65]] = torch.tensor([1.0, 1.0, 2.0])
    sampler = begun([row()], 70, backend)
    buffers = _logprobs(sampler, logits, [65], {0: 6})
    (entry,) = buffers.entries(buffers.values, [65])
    assert entry is not None
    assert [token for token, _ in entry.top] == [65, 3, 66, 0, 1, 2]
    assert entry.top[0][1] == pytest.approx(entry.logprob)
    assert [logprob for _, logprob in entry.top[3:]] == [-inf] * 3
    few = torch.tensor([[0.0, 1.0]])
    buffers = _logprobs(begun([row()], 2, backend), few, [0], {0: 20})
    (entry,) = buffers.entries(buffers.values, [0])
    assert entry is not None
    assert [token for token, _ in entry.top] == [1, 0]


@BACKENDS
def test_a_row_without_a_token_reports_nothing(backend: str) -> None:
    logits = random_logits(2)
    logits[0, 5] = nan
    sampler = begun([row(), row()], 150, backend)
    tokens = choose(sampler, logits, [row(), row()])
    buffers = _logprobs(sampler, logits, tokens, {0: 5, 1: 1})
    nothing, entry = buffers.entries(buffers.values, tokens)
    assert nothing is None
    assert entry is not None
    assert entry.token_id == tokens[1]
