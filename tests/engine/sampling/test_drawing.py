"""Draws and log-probabilities by groups are those of the whole row."""

from __future__ import annotations

import pytest
import torch

from millrace.engine.kernels.random_stream import stream_key, uniforms
from millrace.engine.sampling.groups import GROUP_TOKENS
from millrace.engine.sampling.top_k_top_p import ascending, ascending_order, smallest
from millrace.schemas.sampling import SamplingParams
from tests.engine.sampling.sampling_rows import random_logits, row, sample


def raced(logits: torch.Tensor, temperature: float, key: int, index: int) -> int:
    """Race as it is defined: every group of the row takes part with its exact weight."""
    padded = torch.nn.functional.pad(logits, (0, -len(logits) % GROUP_TOKENS), value=-torch.inf)
    weights = ((padded - padded.max()) / temperature).exp().view(-1, GROUP_TOKENS)
    times = -uniforms(torch.tensor([key]), torch.tensor([index]), GROUP_TOKENS + len(weights))[0]
    times = -(-times).log()
    group = int((weights.double().sum(-1) / times[GROUP_TOKENS:]).argmax())
    member = int((weights[group] / times[:GROUP_TOKENS]).argmax())
    return group * GROUP_TOKENS + member


@pytest.mark.parametrize("vocab_size", [1, 64, 1000, 30_000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 20.0])
def test_groups_that_cannot_win_are_not_missed(vocab_size: int, scale: float) -> None:
    logits = random_logits(60, vocab_size=vocab_size) * scale
    temperatures = [0.3 + 0.025 * i for i in range(60)]
    rows = [row(index=i, seed=i, temperature=t) for i, t in enumerate(temperatures)]
    wanted = [raced(logits[i], t, stream_key(i), i) for i, t in enumerate(temperatures)]
    assert sample(logits, rows).token_ids == wanted


@pytest.mark.parametrize("vocab_size", [3, 130, 5000])
def test_logprobs_are_those_of_the_model(vocab_size: int) -> None:
    logits = random_logits(8, vocab_size=vocab_size).bfloat16()
    rows = [
        row(
            seed=i,
            temperature=(0.0, 1.5)[i % 2],
            logprobs=(None, 0, 3, 20)[i % 4],
            logit_bias={1: 50.0} if i % 3 else {},
            top_k=i,
        )
        for i in range(8)
    ]
    drawn = sample(logits, rows)
    table = logits.double().log_softmax(-1)
    for i, (token, entry) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
        wanted = rows[i].request.sampling.logprobs
        if wanted is None:
            assert entry is None
            continue
        assert token is not None
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(table[i, token]), abs=1e-5)
        likeliest = table[i].topk(min(wanted, vocab_size)).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(likeliest, abs=1e-5)
        for top_id, value in entry.top:
            assert value == pytest.approx(float(table[i, top_id]), abs=1e-5)


def test_rows_are_ordered_as_torch_orders_them() -> None:
    values = random_logits(5, vocab_size=300)
    values[1, 50:] = torch.inf
    values[2] = 1.0
    assert torch.equal(ascending(values), values.sort(-1).values)
    assert torch.equal(smallest(values, 40), values.sort(-1).values[:, :40])
    assert torch.equal(smallest(values, 400), values.sort(-1).values)
    assert torch.equal(values.gather(1, ascending_order(values)), values.sort(-1).values)


def test_a_row_of_equals_is_drawn_from_evenly() -> None:
    for params in ({"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.2}, {"min_p": 1.0}):
        logits = torch.zeros(400, 1000)
        tokens = sample(logits, [row(seed=i, **params) for i in range(400)]).token_ids
        assert len(set(tokens)) > 250, params


def test_integers_do_for_all_numbers() -> None:
    sampling = SamplingParams(temperature=1, top_p=1, min_p=0, typical_p=1, repetition_penalty=2)
    logits = random_logits(2)
    rows = [row(temperature=1), row(temperature=1, min_p=1, presence_penalty=1, logit_bias={2: 1})]
    assert sampling.temperature == 1
    assert sample(logits, rows).errors == [None, None]
