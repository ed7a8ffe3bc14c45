"""Start times of conditions, and the alerts that they become."""

from __future__ import annotations

import pytest

from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import (
    AlertCondition,
    AlertState,
    AlertWatch,
    alert_of,
    unknown_alert,
)
from tests.support.manual_clock import ManualClock

_NAME = "MillraceQueueOld"


def old(subject: str = "demo", *, holds: bool = True) -> AlertCondition:
    return AlertCondition(name=_NAME, subject=subject, value=31.0, holds=holds)


def states(watch: AlertWatch) -> dict[str, AlertState]:
    return {alert.subject: alert.state for alert in watch.alerts()}


async def test_alert_fires_when_its_condition_has_held_for_the_rule_s_time() -> None:
    clock = ManualClock()
    begin_s = clock.now_ns() / 1e9
    watch = AlertWatch(clock)
    watch.look([old(), old("other", holds=False)])
    assert states(watch) == {"demo": AlertState.PENDING, "other": AlertState.OK}
    await clock.advance(RULES[_NAME].for_s - 1)
    watch.look([old(), old("other")])
    assert states(watch) == {"demo": AlertState.PENDING, "other": AlertState.PENDING}
    await clock.advance(1)
    watch.look([old(), old("other")])
    assert states(watch) == {"demo": AlertState.FIRING, "other": AlertState.PENDING}
    [demo, _] = watch.alerts()
    assert (demo.since_s, demo.severity, demo.bound) == (begin_s, "page", 30)
    # A moment in which it did not hold begins it anew.
    watch.look([old(holds=False)])
    watch.look([old()])
    assert states(watch) == {"demo": AlertState.PENDING}
    # A model that is not seen any more is no alert.
    watch.look([])
    assert watch.alerts() == []


def test_alert_with_its_own_bound_and_unknown_alert() -> None:
    known = AlertCondition(name="MillraceFirstTokensLate", value=0.5, holds=True, bound=0.144)
    alert = alert_of(known, since_s=100.0, now_s=100.0)
    assert (alert.state, alert.bound, alert.since_s) == (AlertState.FIRING, 0.144, 100.0)
    unknown = unknown_alert("MillracePoison", "telemetry does not answer")
    assert (unknown.state, unknown.value, unknown.detail) == (
        AlertState.UNKNOWN,
        None,
        "telemetry does not answer",
    )
    with pytest.raises(KeyError):
        unknown_alert("Nothing", "")
