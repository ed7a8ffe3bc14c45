"""Beam selection of a search, compared with a search that never ends early."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.beam_search import BeamCompletion, BeamHypothesis, BeamSearch
from millrace.engine.step.fork_group import Candidate
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import SamplingParams

VOCAB_SIZE = 9
STOPS = frozenset({0, 1})


def logprobs_after(seed: int, token_ids: tuple[int, ...]) -> list[float]:
    """Return a language model: log-probabilities of the whole vocabulary after some tokens."""
    weights = random.Random(f"{seed} {token_ids}")
    logits = [weights.gauss(0.0, 2.0) for _ in range(VOCAB_SIZE)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def search_of(max_tokens: int, **params: Any) -> BeamSearch:
    sampling = SamplingParams(use_beam_search=True, **params)
    return BeamSearch(sampling, max_tokens=max_tokens, stop_token_ids=STOPS)


def run(search: BeamSearch, model: Callable[[tuple[int, ...]], list[float]]) -> int:
    """Run the search to its end; return its number of steps."""
    beams = [BeamHypothesis((), 0.0)]
    for step in range(1, 100):
        candidates = []
        for beam in beams:
            excluded = search.excluded(len(beam.token_ids))
            ranked = sorted(enumerate(model(tuple(beam.token_ids))), key=lambda c: -c[1])
            allowed = [Candidate(*one) for one in ranked if one[0] not in excluded]
            candidates.append(allowed[: search.num_candidates])
        extensions = search.extend(beams, candidates)
        if not extensions:
            return step
        beams = [BeamHypothesis((*beams[e.beam].token_ids, e.token), e.logprob) for e in extensions]
    raise AssertionError("the search does not end")


def exhaustive(
    model: Callable[[tuple[int, ...]], list[float]],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float,
    min_tokens: int,
) -> list[tuple[tuple[int, ...], float, FinishReason]]:
    """Search by the plainest method, which never ends before ``max_tokens``."""
    answers: list[tuple[tuple[int, ...], float, FinishReason]] = []
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for length in range(1, max_tokens + 1):
        longer = []
        for token_ids, total in beams:
            ranked = sorted(enumerate(model(token_ids)), key=lambda c: -c[1])
            allowed = [one for one in ranked if length > min_tokens or one[0] not in STOPS]
            for token, logprob in allowed[: 2 * width]:
                reached = (*token_ids, token), total + logprob
                if token not in STOPS:
                    longer.append(reached)
                else:
                    answers.append((*reached, FinishReason.STOP))
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    answers += [(*beam, FinishReason.LENGTH) for beam in beams]
    answers.sort(key=lambda answer: -answer[1] / len(answer[0]) ** length_penalty)
    return answers[:width]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 7),
    length_penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 2.0]),
    min_tokens=st.integers(0, 3),
)
def test_ending_early_changes_no_answer(
    seed: int, width: int, max_tokens: int, length_penalty: float, min_tokens: int
) -> None:
    def model(token_ids: tuple[int, ...]) -> list[float]:
        return logprobs_after(seed, token_ids)

    min_tokens = min(min_tokens, max_tokens)
    search = search_of(max_tokens, n=width, length_penalty=length_penalty, min_tokens=min_tokens)
    run(search, model)
    expected = exhaustive(
        model,
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        min_tokens=min_tokens,
    )
    assert [a.token_ids for a in search.answers] == [tokens for tokens, _, _ in expected]
    assert [a.finish_reason for a in search.answers] == [reason for _, _, reason in expected]
    logprobs = [logprob for _, logprob, _ in expected]
    assert [a.logprob for a in search.answers] == pytest.approx(logprobs)


def test_a_search_is_over_when_nothing_better_can_come() -> None:
    """A search ends as soon as its answer is likelier than any answer of the remaining beams."""
    certain = [-9.0] * VOCAB_SIZE
    certain[0] = -0.001
    search = search_of(50, n=1)
    assert run(search, lambda _: certain) == 1
    assert search.answers == [BeamCompletion((0,), -0.001, -0.001, FinishReason.STOP)]


def test_a_longer_answer_is_waited_for_if_length_is_rewarded() -> None:
    """The log-probabilities of all tokens are about equal, and so are their means."""
    even = [-1.9, -9.0, *[-2.0] * (VOCAB_SIZE - 2)]
    search = search_of(12, n=1, length_penalty=3.0)
    assert run(search, lambda _: even) == 12
    assert len(search.answers[0].token_ids) == 12
    short = search_of(12, n=1, length_penalty=0.0)
    assert run(short, lambda _: even) == 1
    assert short.answers[0].token_ids == (0,)


def test_equals_come_in_the_order_of_beams_and_tokens() -> None:
    search = search_of(3, n=2)
    beams = [BeamHypothesis((5,), -1.0), BeamHypothesis((4,), -1.0)]
    even = [Candidate(token, -1.0) for token in (7, 3, 8, 6)]
    extensions = search.extend(beams, [even, even])
    assert [(e.beam, e.token) for e in extensions] == [(0, 3), (0, 6)]
