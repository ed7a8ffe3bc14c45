"""The likeliest token of a row of logits beside torch's."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.sampling.sampler import Sampler
from millrace.engine.types import NonFiniteLogitsError
from tests.engine.kernels.compiled import compiled
from tests.engine.sampling.sampling_rows import random_logits, row


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 70) | st.sampled_from([8192, 50_257]),
    seed=st.integers(0, 2**30),
)
def test_likeliest_token_is_the_first_of_the_largest(num_rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    # Few values, so that several are the largest.
    logits = torch.randint(-3, 4, (num_rows, width)).float()
    expected = [values.index(max(values)) for values in logits.tolist()]
    assert compiled(torch.bfloat16).likeliest(logits) == expected


@pytest.mark.parametrize("place", [0, 17, 47, 48, 50])
@pytest.mark.parametrize("value", [nan, inf])
def test_a_row_that_is_not_finite_has_none(place: int, value: float) -> None:
    logits = torch.randn(3, 51)
    logits[1, place] = value
    tokens = compiled(torch.bfloat16).likeliest(logits)
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def test_a_row_of_nothing_but_what_is_forbidden_has_none() -> None:
    assert compiled(torch.float32).likeliest(torch.full((1, 40), -inf)) == [-1]


def test_the_sampler_chooses_by_it_and_says_what_is_not_finite() -> None:
    logits = random_logits(4)
    rows = [row(temperature=0.0) for _ in range(4)]
    sampler = Sampler(logits.shape[1], logits.device, likeliest=compiled(torch.float32).likeliest)
    for sequence in rows:
        sampler.add(sequence)
    assert sampler.sample(rows, logits).outcomes == logits.argmax(-1).tolist()
    logits[2, 5] = nan
    outcomes = sampler.sample(rows, logits).outcomes
    assert isinstance(outcomes[2], NonFiniteLogitsError)
    assert [outcomes[i] for i in (0, 1, 3)] == logits[[0, 1, 3]].argmax(-1).tolist()
