"""Decisions on a rollout: continue, raise the share, abort or complete. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from millrace.registry.rollouts.abort_rule import AbortRule, Seen
from millrace.registry.rollouts.versions import INITIAL, Versions, split
from millrace.schemas.errors import ModelNotFoundError, ParameterError
from millrace.schemas.models.rollouts import (
    Rollout,
    RolloutConflictError,
    RolloutState,
    StartRolloutRequest,
)

_NS_PER_S = 1e9
_WHOLE = 100.0
# A candidate has no workers any more if its requests wait this long with no worker up.
STRANDED_S = 10.0
BY_HAND = "by hand"


class Situation(NamedTuple):
    """State of both versions.

    ``has_worker``: a worker of the candidate takes work. ``stranded_s``: how long its requests have
    waited with no worker up. Figures count since the last change of the share.
    """

    has_worker: bool
    stranded_s: float
    candidate: Seen
    stable: Seen


def begin(
    asked: StartRolloutRequest,
    names: Collection[str],
    rollouts: Mapping[str, Rollout],
    now_ns: int,
) -> Rollout:
    """Return the requested rollout, of the catalogue's ``names`` and after the former ``rollouts``.

    Raises:
        ParameterError: a field is invalid; names it.
        ModelNotFoundError: there is no such version.
        RolloutConflictError: the version has all traffic already.
    """
    for field, low in (("canary_percent", 0), ("step_percent", 0), ("interval_s", 0)):
        value = getattr(asked, field)
        high = math.inf if field == "interval_s" else _WHOLE
        if not (low < value <= high) or not math.isfinite(value):
            limit = " and at most 100" if math.isfinite(high) else ""
            raise ParameterError(field, f"{field} must be above {low}{limit}, got {value:g}.")
    if asked.min_requests < 0:
        raise ParameterError("min_requests", "min_requests must be 0 or more.")
    AbortRule.parse(asked.abort_if)
    versions = Versions(names)
    model, label = split(asked.version)
    name = model if label == INITIAL else asked.version
    if name not in versions.of(model):
        known = ", ".join(versions.of(model)) or "none"
        raise ModelNotFoundError(
            f"There is no version {asked.version!r:.200}. Versions of {model!r:.200}: {known}."
        )
    stable = versions.stable(model, rollouts)
    if name == stable:
        raise RolloutConflictError(f"{name} answers for {model} already.")
    return Rollout(
        model=model,
        stable=stable,
        candidate=name,
        canary_percent=asked.canary_percent,
        step_percent=asked.step_percent,
        interval_s=asked.interval_s,
        min_requests=asked.min_requests,
        abort_if=asked.abort_if.strip(),
        started_ns=now_ns,
        stepped_ns=now_ns,
    )


def decide(rollout: Rollout, situation: Situation, now_ns: int) -> Rollout | None:
    """Return the changed rollout; None if it stays as it is.

    A breach counts once ``min_requests`` of the candidate have ended (at least one). A candidate
    whose requests find no worker is aborted as well.
    """
    if rollout.state is RolloutState.WAITING:
        return (
            _with_share(rollout, rollout.canary_percent, now_ns) if situation.has_worker else None
        )
    if rollout.state is not RolloutState.RUNNING:
        return None
    if situation.stranded_s >= STRANDED_S:
        return aborted(rollout, f"{rollout.candidate} has no worker", now_ns)
    num_seen = situation.candidate.num_requests
    if num_seen >= max(rollout.min_requests, 1):
        breach = AbortRule.parse(rollout.abort_if).breach(situation.candidate, situation.stable)
        if breach is not None:
            return aborted(rollout, breach, now_ns)
    if now_ns - rollout.stepped_ns < rollout.interval_s * _NS_PER_S:
        return None
    if num_seen < rollout.min_requests:
        return None
    return _with_share(rollout, rollout.percent + rollout.step_percent, now_ns)


def aborted(rollout: Rollout, reason: str, now_ns: int) -> Rollout:
    """Return the rollout aborted: all traffic goes to the stable version again."""
    return replace(rollout, state=RolloutState.ABORTED, percent=0.0, reason=reason, ended_ns=now_ns)


def returned(rollout: Rollout, names: Collection[str], now_ns: int) -> Rollout | None:
    """Return the rollout reverted by hand; None if there is nothing to revert to.

    An open rollout is aborted. A completed one moves back to the former stable version, if that is
    still among the catalogue's ``names``.
    """
    if rollout.is_open:
        return aborted(rollout, BY_HAND, now_ns)
    if rollout.state is RolloutState.COMPLETED and rollout.former in names:
        back = replace(rollout, stable=rollout.former, candidate=rollout.stable, former="")
        return aborted(back, BY_HAND, now_ns)
    return None


def _with_share(rollout: Rollout, percent: float, now_ns: int) -> Rollout:
    if percent < _WHOLE:
        return replace(rollout, state=RolloutState.RUNNING, percent=percent, stepped_ns=now_ns)
    return replace(
        rollout,
        state=RolloutState.COMPLETED,
        percent=0.0,
        stable=rollout.candidate,
        former=rollout.stable,
        stepped_ns=now_ns,
        ended_ns=now_ns,
    )
