"""A short run of ``benchmarks.chaos``, with one event of every kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.faults import EVENTS
from benchmarks.chaos.loads import LOADS, Answer, Arrivals, Choice, PartsAnswer
from benchmarks.chaos.rounds import is_other

_ROOT = Path(__file__).resolve().parents[2]
# What else is killed, freezes or is hard to move takes twice as long again: tests/e2e has it piece
# by piece (test_kill.py, test_gateways.py).
_ROUNDS = (
    "worker killed",
    "worker drained",
    "twin names",
    "gateway killed",
    "killed under n = 3",
)


@pytest.mark.slow(reason="runs a round of faults on a whole system for each kind of event")
@pytest.mark.timeout(360)
def test_nothing_is_lost_repeated_or_answered_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--smoke", "--only", *_ROUNDS],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=350.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in _ROUNDS:
        assert f"{name}: 1 rounds, 0 lost, 0 with wrong indices" in done.stdout
    assert "all checks passed" in done.stdout


def test_every_round_has_a_load_and_a_name_of_its_own() -> None:
    assert len({event.name for event in EVENTS}) == len(EVENTS)
    assert {event.load for event in EVENTS} == LOADS.keys()
    assert set(_ROUNDS) < {event.name for event in EVENTS}


def test_an_answer_is_another_if_a_call_a_token_or_its_probability_is() -> None:
    def answer(call: str = "{}", token: str = "a", logprob: float = -1.0) -> Answer:
        choice = Choice()
        choice.read(
            {
                "delta": {"tool_calls": [{"index": 0, "function": {"arguments": call}}]},
                "logprobs": {"content": [{"token": token, "logprob": logprob, "top_logprobs": []}]},
                "finish_reason": "stop",
            }
        )
        return PartsAnswer("r", choice.line(), "stop", 1, 1, {0: choice.logprobs})

    assert not is_other(answer(), answer())
    assert not is_other(answer(logprob=-1.001), answer())
    for other in (answer(call="[]"), answer(token="b"), answer(logprob=-1.5)):
        assert is_other(other, answer())


@pytest.mark.parametrize(
    ("parts_s", "gap_s"),
    [
        ([1.0, 2.0, 6.0, 6.5], 4.0),  # across the event at 3
        ([1.0, 2.0, 3.5, 6.0], 2.5),  # behind it
        ([1.0, 2.5], None),  # over by then
        ([4.0, 9.0], None),  # not begun by then
        ([2.0, 4.0, 20.0, 90.0], 16.0),  # the last one begins too late to be its doing
        ([], None),
    ],
)
def test_the_longest_silence_is_that_across_the_event(
    parts_s: list[float], gap_s: float | None
) -> None:
    arrivals = Arrivals()
    arrivals.parts_s = parts_s
    assert arrivals.longest_gap_s(3.0, 13.0) == gap_s
