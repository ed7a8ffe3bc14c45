"""States of alerts, with their start times."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from millrace.runtime.alerts.rules import RULES
from millrace.runtime.clock import Clock

_NS_PER_S = 10**9


class AlertState(StrEnum):
    """State of an alert.

    ``pending``: the condition holds, but for less than the rule's time. ``unknown``: the source
    does not answer.
    """

    OK = "ok"
    PENDING = "pending"
    FIRING = "firing"
    UNKNOWN = "unknown"


class AlertCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Condition of a rule for a ``subject`` (model, worker or store; empty: the system).

    It has the value, if known, and whether the condition ``holds``. ``bound`` replaces the rule's
    bound if it is set.
    """

    name: str
    subject: str = ""
    value: float | None = None
    holds: bool = False
    bound: float | None = None
    detail: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Rule with its present state. ``since_s`` is the Unix time since which the condition has held.

    None while the condition does not hold.
    """

    name: str
    subject: str
    state: AlertState
    severity: str
    value: float | None
    bound: float
    unit: str
    for_s: float
    since_s: float | None
    meaning: str
    advice: str
    detail: str = ""


def alert_of(condition: AlertCondition, since_s: float | None, now_s: float) -> Alert:
    """Return the alert at ``now_s`` for a condition that has held since ``since_s``."""
    state = AlertState.OK
    if condition.holds:
        since_s = now_s if since_s is None else since_s
        is_due = now_s - since_s >= RULES[condition.name].for_s
        state = AlertState.FIRING if is_due else AlertState.PENDING
    return _alert(condition, state, since_s if condition.holds else None)


def unknown_alert(name: str, why: str) -> Alert:
    """Return an alert in the state unknown, with the reason."""
    return _alert(AlertCondition(name=name, detail=why), AlertState.UNKNOWN, None)


def _alert(condition: AlertCondition, state: AlertState, since_s: float | None) -> Alert:
    rule = RULES[condition.name]
    return Alert(
        name=rule.name,
        subject=condition.subject,
        state=state,
        severity=rule.severity,
        value=condition.value,
        bound=rule.bound if condition.bound is None else condition.bound,
        unit=rule.unit,
        for_s=rule.for_s,
        since_s=since_s,
        meaning=rule.meaning,
        advice=rule.advice,
        detail=condition.detail,
    )


class AlertWatch:
    """Alert watch: keeps the start times of conditions that hold without a break.

    Call ``look`` every few seconds. Conditions that are no longer reported are forgotten.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: dict[tuple[str, str], float] = {}
        self._latest: list[AlertCondition] = []

    def look(self, conditions: Iterable[AlertCondition]) -> None:
        """Update all conditions."""
        now_s = self._now_s()
        self._latest = list(conditions)
        self._since_s = {
            (one.name, one.subject): self._since_s.get((one.name, one.subject), now_s)
            for one in self._latest
            if one.holds
        }

    def alerts(self) -> list[Alert]:
        """Return the alerts as of the last look."""
        now_s = self._now_s()
        return [
            alert_of(one, self._since_s.get((one.name, one.subject)), now_s) for one in self._latest
        ]

    def _now_s(self) -> float:
        return self._clock.now_ns() / _NS_PER_S
