"""Tokens that top-k and top-p keep, by the definitions and by transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from millrace.engine.sampling.groups import GROUP_TOKENS, ScaledRows, largest
from millrace.engine.sampling.top_k_top_p import filter_top_k_top_p, limits_of
from millrace.schemas.sampling import SamplingParams
from tests.engine.sampling.sampling_reference import distribution
from tests.engine.sampling.sampling_rows import random_logits

_NOTHING = 1e-30


def kept(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return which tokens stay: bool [num_rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    padding = (0, -vocab_size % GROUP_TOKENS)
    members = torch.nn.functional.pad(logits, padding, value=-torch.inf)
    grouped = largest(members.view(num_rows, -1, GROUP_TOKENS))
    temperatures = torch.tensor([p.temperature for p in params])
    limits = limits_of(params, vocab_size, logits.device)
    if limits is None:
        return torch.ones_like(logits, dtype=torch.bool)
    peaks = (grouped.tops - grouped.best[:, None]) / temperatures[:, None]
    rows = ScaledRows(torch.arange(num_rows), grouped.best, temperatures)
    low, high = filter_top_k_top_p(grouped, rows, peaks, limits)
    scaled = (logits - grouped.best[:, None]) / temperatures[:, None]
    inside = scaled >= low[:, None]
    return inside if high is None else inside & (scaled <= high[:, None])


def one_of(values: st.SearchStrategy[Any], off: float) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), values)


OPTIONS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 2.0),
    top_k=one_of(st.integers(1, 400), 0),
    top_p=one_of(st.floats(0.01, 0.9999), 1.0),
    min_p=one_of(st.floats(0.0001, 0.99), 0.0),
    typical_p=one_of(st.floats(0.01, 0.9999), 1.0),
)


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(OPTIONS, min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.01, 0.5, 2.0, 10.0]),
    vocab_size=st.sampled_from([1, 5, 64, 130, 1000, 5000]),
)
def test_what_stays_is_what_the_definitions_keep(
    params: list[SamplingParams], seed: int, scale: float, vocab_size: int
) -> None:
    logits = random_logits(len(params), seed, vocab_size) * scale
    inside = kept(logits, params)
    for row, sampling in enumerate(params):
        wanted = distribution(logits[row].double().numpy(), sampling)
        drawn = torch.where(inside[row], (logits[row].double() / sampling.temperature), -torch.inf)
        given_shares = drawn.softmax(-1).numpy()
        # A token at the very edge may fall on either side by rounding.
        differing = (wanted > _NOTHING) != (given_shares > _NOTHING)
        assert differing.sum() <= 1
        at_edge = float(np.maximum(wanted, given_shares)[differing].sum())
        assert np.abs(given_shares - wanted).sum() <= 2.5 * at_edge + 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 500}, [TopKLogitsWarper(500)]),
        ({"top_p": 0.3}, [TopPLogitsWarper(0.3)]),
        ({"top_p": 0.95}, [TopPLogitsWarper(0.95)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"typical_p": 0.2}, [TypicalLogitsWarper(0.2)]),
        ({"typical_p": 0.95}, [TypicalLogitsWarper(0.95)]),
        (
            {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
            [TopKLogitsWarper(40), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02)],
        ),
        (
            {"top_k": 90, "top_p": 0.9, "typical_p": 0.7},
            [TopKLogitsWarper(90), TopPLogitsWarper(0.9), TypicalLogitsWarper(0.7)],
        ),
    ],
)
def test_what_stays_is_what_transformers_keeps(
    params: dict[str, Any], warpers: list[Any], temperature: float
) -> None:
    num_rows = 40
    logits = random_logits(num_rows, vocab_size=3000)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), *warpers])
    wanted = processors(torch.zeros(num_rows, 1, dtype=torch.long), logits) > -torch.inf
    sampling = SamplingParams(temperature=temperature, **params)
    differing = (kept(logits, [sampling] * num_rows) != wanted).sum()
    assert differing <= 1


def test_ties_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0] + [-9.0] * 100] * 3)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.92), SamplingParams(min_p=0.1)]
    for row in kept(logits, params):
        assert row.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_rows_of_very_different_widths_do_not_mix() -> None:
    """A flat row, peaked rows and some in between are narrowed together."""
    logits = random_logits(12, vocab_size=20_000)
    logits[::3] *= 0.01
    logits[1::3] *= 8
    params = [SamplingParams(top_p=0.9 + 0.008 * i, top_k=(0, 0, 30)[i % 3]) for i in range(12)]
    together = kept(logits, params)
    for i in range(12):
        assert torch.equal(together[i : i + 1], kept(logits[i : i + 1], [params[i]]))
        wanted = distribution(logits[i].double().numpy(), params[i])
        assert (together[i].numpy() != (wanted > 0)).sum() <= 1
