"""Decisions of a rollout: it goes on, ends, or turns back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from millrace.registry.rollouts.abort_rule import Seen, VersionOutcome
from millrace.registry.rollouts.decisions import Situation, begin, decide, returned
from millrace.schemas.errors import ModelNotFoundError, ParameterError
from millrace.schemas.models.rollouts import (
    Rollout,
    RolloutConflictError,
    RolloutState,
    StartRolloutRequest,
)

NAMES = ("chat", "chat@v2", "other")
S = 1_000_000_000
ASKED = StartRolloutRequest(
    version="chat@v2",
    canary_percent=10.0,
    step_percent=40.0,
    interval_s=60.0,
    min_requests=5,
    abort_if="error_rate>0.1",
)


def _seen(num_requests: int, num_errors: int = 0) -> Seen:
    return Seen.of(
        [
            VersionOutcome(0, is_error=number < num_errors, ttft_ms=1.0)
            for number in range(num_requests)
        ]
    )


def _situation(
    candidate: Seen | None = None, *, has_worker: bool = True, stranded_s: float = 0.0
) -> Situation:
    return Situation(has_worker, stranded_s, candidate or _seen(0), _seen(100))


def _running(percent: float = 10.0) -> Rollout:
    begun = begin(ASKED, NAMES, {}, 0)
    return replace(begun, state=RolloutState.RUNNING, percent=percent)


def test_traffic_moves_in_steps_until_all_of_it_has_moved() -> None:
    rollout = begin(ASKED, NAMES, {}, 0)
    assert (rollout.model, rollout.stable, rollout.candidate) == ("chat", "chat", "chat@v2")
    assert decide(rollout, _situation(has_worker=False), 99 * S) is None
    shares = []
    now_s = 100
    while rollout.is_open:
        changed = decide(rollout, _situation(_seen(5)), now_s * S)
        assert changed is not None
        rollout = changed
        shares.append(rollout.percent)
        assert decide(rollout, _situation(_seen(5)), (now_s + 59) * S) is None
        now_s += 60
    assert shares == [10.0, 50.0, 90.0, 0.0]
    assert (rollout.state, rollout.stable, rollout.former) == (
        RolloutState.COMPLETED,
        "chat@v2",
        "chat",
    )
    assert decide(rollout, _situation(_seen(5, 5)), 10**6 * S) is None


def test_share_without_requests_does_not_grow() -> None:
    assert decide(_running(), _situation(_seen(4)), 1_000 * S) is None
    assert decide(_running(), _situation(_seen(5)), 1_000 * S) is not None


def test_a_breach_turns_back_at_once_but_not_after_too_few() -> None:
    assert decide(_running(), _situation(_seen(4, 4)), 1 * S) is None
    turned = decide(_running(), _situation(_seen(5, 1)), 1 * S)
    assert turned is not None
    assert (turned.state, turned.percent, turned.stable) == (RolloutState.ABORTED, 0.0, "chat")
    assert turned.reason == "error_rate is 20.00%, over 10.00%"
    assert turned.ended_ns == 1 * S


def test_version_without_workers_is_given_up_once_a_request_has_waited_for_it() -> None:
    assert decide(_running(), _situation(has_worker=False), 5 * S) is None
    assert decide(_running(), _situation(has_worker=False, stranded_s=9.0), 5 * S) is None
    turned = decide(_running(), _situation(has_worker=False, stranded_s=10.0), 5 * S)
    assert turned is not None
    assert turned.reason == "chat@v2 has no worker"


def test_all_at_once() -> None:
    begun = begin(StartRolloutRequest(version="chat@v2"), NAMES, {}, 0)
    done = decide(begun, _situation(), 1 * S)
    assert done is not None
    assert (done.state, done.stable) == (RolloutState.COMPLETED, "chat@v2")


def test_rollout_is_reverted_by_hand_once_even_after_its_end() -> None:
    turned = returned(_running(50.0), NAMES, 1 * S)
    assert turned is not None
    assert (turned.state, turned.reason) == (RolloutState.ABORTED, "by hand")
    assert returned(turned, NAMES, 2 * S) is None
    done = decide(_running(90.0), _situation(_seen(5)), 60 * S)
    assert done is not None
    assert returned(done, ("chat@v2", "chat@v3"), 70 * S) is None  # where to has gone
    back = returned(done, NAMES, 70 * S)
    assert back is not None
    assert (back.stable, back.candidate) == ("chat", "chat@v2")
    assert returned(back, NAMES, 80 * S) is None


def test_after_one_rollout_the_next_begins_where_it_ended() -> None:
    done = decide(_running(90.0), _situation(_seen(5)), 60 * S)
    assert done is not None
    back = begin(StartRolloutRequest(version="chat@initial"), NAMES, {"chat": done}, 0)
    assert (back.stable, back.candidate) == ("chat@v2", "chat")
    with pytest.raises(RolloutConflictError, match="chat@v2 answers for chat already"):
        begin(ASKED, NAMES, {"chat": done}, 0)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"canary_percent": 0.0}, "canary_percent"),
        ({"canary_percent": 101.0}, "canary_percent"),
        ({"step_percent": -1.0}, "step_percent"),
        ({"interval_s": 0.0}, "interval_s"),
        ({"interval_s": float("inf")}, "interval_s"),
        ({"canary_percent": float("nan")}, "canary_percent"),
        ({"min_requests": -1}, "min_requests"),
        ({"abort_if": "slow"}, "abort_if"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, object], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        begin(replace(ASKED, **changes), NAMES, {}, 0)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "version", ["chat@v9", "other", "other@initial", "nothing@v1", "chat@stable"]
)
def test_a_version_that_is_not_there_is_refused(version: str) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no version"):
        begin(replace(ASKED, version=version), NAMES, {}, 0)
