"""Reports of the engine's process: sent at once, or gathered."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.workers.process.loop import OutputGatherer

INTERVAL_S = 0.015


def _request(request_id: str, *, watched: bool = False) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=(1,), watched=watched)


def _token(
    request_id: str, token_id: int, finish: FinishReason | None = None, choice: int = 0
) -> EngineOutput:
    logprob = TokenLogprob(token_id=token_id, logprob=-0.5, top=())
    return EngineOutput(
        request_id=request_id,
        choice=choice,
        token_ids=(token_id,),
        logprobs=(logprob,),
        finish_reason=finish,
    )


def _in_the_middle(request_id: str, *, watched: bool = False) -> OutputGatherer:
    gathered = OutputGatherer(INTERVAL_S)
    gathered.begin(_request(request_id, watched=watched))
    gathered.add([_token(request_id, 1)])
    assert gathered.is_due(0.0), "a first token"
    assert len(gathered.pop(0.0)) == 1
    return gathered


def test_tokens_in_the_middle_come_in_one_piece_when_it_is_time() -> None:
    gathered = _in_the_middle("a")
    for number, now_s in enumerate((0.004, 0.008, 0.012), start=2):
        gathered.add([_token("a", number)])
        assert not gathered.is_due(now_s)
    gathered.add([_token("a", 5)])
    assert gathered.is_due(0.016)
    [output] = gathered.pop(0.016)
    assert output.token_ids == (2, 3, 4, 5)
    assert [logprob.token_id for logprob in output.logprobs] == [2, 3, 4, 5]
    assert not gathered.is_due(9.0), "nothing is held"


@pytest.mark.parametrize(
    "news",
    [
        _token("a", 3, FinishReason.STOP),
        _token("b", 3),
        _token("a", 3, choice=1),
        EngineOutput(request_id="b", started=True),
        EngineOutput(request_id="b", error=("failed", "it failed")),
    ],
    ids=["an end", "a first token", "another choice", "a start", "an error"],
)
def test_what_begins_or_ends_an_answer_takes_the_others_along(news: EngineOutput) -> None:
    gathered = _in_the_middle("a")
    gathered.add([_token("a", 2)])
    assert not gathered.is_due(0.001)
    gathered.add([news])
    assert gathered.is_due(0.002)
    reported = gathered.pop(0.002)
    assert next(token_id for output in reported for token_id in output.token_ids) == 2
    assert {output.finish_reason for output in reported} >= {news.finish_reason}


def test_each_token_of_a_watched_request_is_told_at_once() -> None:
    gathered = _in_the_middle("a", watched=True)
    gathered.add([_token("a", 2)])
    assert gathered.is_due(0.001)


def test_a_request_that_starts_without_a_token_has_its_first_one_told_at_once() -> None:
    gathered = OutputGatherer(INTERVAL_S)
    gathered.add([EngineOutput(request_id="a", started=True)])
    assert gathered.is_due(0.0)
    gathered.pop(0.0)
    gathered.add([_token("a", 1)])
    assert gathered.is_due(0.001)


def test_nothing_is_remembered_of_what_is_over() -> None:
    gathered = _in_the_middle("a", watched=True)
    gathered.forget("a")
    gathered.begin(_request("b", watched=True))
    gathered.add([_token("b", 1), _token("b", 2, FinishReason.LENGTH)])
    assert not gathered._watched
    assert not gathered._in_the_middle


class _Step(NamedTuple):
    took_ms: int
    who: list[int]
    ends: list[int]


_STEPS = st.lists(
    st.builds(
        _Step,
        st.integers(1, 30),
        st.lists(st.integers(0, 4), unique=True, max_size=5),
        st.lists(st.integers(0, 4), unique=True, max_size=2),
    ),
    max_size=40,
)


@given(steps=_STEPS)
def test_every_token_is_told_once_in_order_and_in_time(steps: list[_Step]) -> None:
    gathered = OutputGatherer(INTERVAL_S)
    made, reported = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    incarnation = [0] * 5
    now_s = held_since_s = 0.0
    for number, step in enumerate(steps):
        now_s += step.took_ms / 1e3
        outputs = []
        for who in step.who:
            name = f"{who}.{incarnation[who]}"
            ends = who in step.ends
            incarnation[who] += ends
            made[name].append(number)
            outputs.append(_token(name, number, FinishReason.STOP if ends else None))
        gathered.add(outputs)
        if gathered.is_due(now_s):
            for output in gathered.pop(now_s):
                reported[output.request_id].extend(output.token_ids)
            held_since_s = now_s
            assert reported == {name: tokens for name, tokens in made.items() if tokens}
        else:
            assert now_s - held_since_s < INTERVAL_S or reported == made
    for output in gathered.pop(now_s):
        reported[output.request_id].extend(output.token_ids)
    assert reported == made
