"""Desired number of workers, merged from the reports of several schedulers."""

from __future__ import annotations

from millrace.bus.fleet.desired_replicas import DesiredReplicas
from millrace.schemas.control import QueueStatus


def _status(desired: int, model: str = "demo") -> QueueStatus:
    return QueueStatus(model=model, num_queued=0, bound=10, desired_workers=desired)


def test_the_largest_recent_report_counts() -> None:
    wanted = DesiredReplicas()
    assert wanted.of("demo", 0.0) is None
    wanted.note(_status(2), 0.0)
    wanted.note(_status(5), 0.1)
    wanted.note(_status(1), 0.2)
    assert wanted.of("demo", 0.2) == 5
    wanted.note(_status(1), 3.05)
    assert wanted.of("demo", 3.05) == 5
    assert wanted.of("demo", 3.15) == 1


def test_schedulers_that_are_silent_say_nothing() -> None:
    wanted = DesiredReplicas()
    wanted.note(_status(0), 0.0)
    assert wanted.of("demo", 2.9) == 0
    assert wanted.of("demo", 3.0) is None
    assert wanted.of("other", 0.0) is None


def test_schedulers_that_were_away_are_believed_after_a_while() -> None:
    wanted = DesiredReplicas()
    assert not wanted.is_settled("demo", 0.0)
    wanted.note(_status(3), 0.0)
    assert not wanted.is_settled("demo", 0.0)
    wanted.note(_status(3), 2.0)
    wanted.note(_status(3), 4.0)
    assert wanted.is_settled("demo", 4.0)
    wanted.note(_status(1), 7.5)
    assert wanted.of("demo", 7.5) == 1
    assert not wanted.is_settled("demo", 7.5)
