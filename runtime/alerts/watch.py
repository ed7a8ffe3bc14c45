"""How alerts stand, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from millrace.runtime.alerts.rules import RULES
from millrace.runtime.clock import Clock

_NS_PER_S = 10**9


class AlertState(StrEnum):
    """``pending``: the condition holds, but not for as long as its rule demands. ``unknown``: who
    could tell does not answer."""

    OK = "ok"
    PENDING = "pending"
    FIRING = "firing"
    UNKNOWN = "unknown"


class AlertCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a rule for a ``subject`` (a model, a worker, a store; empty: the system):
    the value, if it can be told, and whether the condition ``holds``. ``bound`` is this system's,
    if that is not the rule's own."""

    name: str
    subject: str = ""
    value: float | None = None
    holds: bool = False
    bound: float | None = None
    detail: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A rule with what was seen of it. ``since_s`` is since when the condition has held without a
    break, a Unix time; None while it does not."""

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
    """The alert at ``now_s`` of a condition that has held since ``since_s``, or does not hold."""
    state = AlertState.OK
    if condition.holds:
        since_s = now_s if since_s is None else since_s
        is_due = now_s - since_s >= RULES[condition.name].for_s
        state = AlertState.FIRING if is_due else AlertState.PENDING
    return _alert(condition, state, since_s if condition.holds else None)


def unknown_alert(name: str, why: str) -> Alert:
    """An alert of which nobody can tell at the moment."""
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
    """Keeps since when conditions have held without a break, as far as this process has looked:
    ``look`` is to be called every few seconds. What is not seen any more is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: dict[tuple[str, str], float] = {}
        self._latest: list[AlertCondition] = []

    def look(self, conditions: Iterable[AlertCondition]) -> None:
        """Take in all conditions as they are now."""
        now_s = self._now_s()
        self._latest = list(conditions)
        self._since_s = {
            (one.name, one.subject): self._since_s.get((one.name, one.subject), now_s)
            for one in self._latest
            if one.holds
        }

    def alerts(self) -> list[Alert]:
        """As of the last look."""
        now_s = self._now_s()
        return [
            alert_of(one, self._since_s.get((one.name, one.subject)), now_s) for one in self._latest
        ]

    def _now_s(self) -> float:
        return self._clock.now_ns() / _NS_PER_S
