"""Messages about rollouts: traffic that moves from one version of a model to another."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from millrace.schemas.errors import MillraceError


class RolloutState(StrEnum):
    """State of a rollout. ``waiting``: no worker of the new version is up, so it has no traffic.
    ``aborted``: all traffic goes to the old version again. ``completed``: all traffic goes to the
    new version."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latest rollout of ``model``, a name with several versions.

    Requests for ``model`` go to ``stable``, except for ``percent`` of them that go to ``candidate``
    while the rollout runs; both are names in the catalogue. The share begins at ``canary_percent``
    and grows by ``step_percent`` after each ``interval_s`` in which at least ``min_requests`` of
    the candidate ended and ``abort_if`` (see ``registry.rollouts.abort_rule``; empty: no rule) did
    not hold. After completion the candidate is ``stable``, and ``former`` is the previous stable
    version. ``reason`` explains an abort. ``stepped_ns`` is the time of the share's last change;
    ``revision`` rises with each change.
    """

    model: str
    stable: str
    candidate: str
    state: RolloutState = RolloutState.WAITING
    percent: float = 0.0
    canary_percent: float = 100.0
    step_percent: float = 20.0
    interval_s: float = 300.0
    min_requests: int = 10
    abort_if: str = ""
    former: str = ""
    reason: str = ""
    started_ns: int = 0
    stepped_ns: int = 0
    ended_ns: int = 0
    revision: int = 0

    @property
    def is_open(self) -> bool:
        """True while the rollout waits or runs."""
        return self.state in (RolloutState.WAITING, RolloutState.RUNNING)


class VersionFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measurements of a version since the share's last change, over ``num_requests`` ended
    requests. Percentiles, by names such as ``ttft_p95``, are in milliseconds."""

    version: str
    num_requests: int = 0
    error_rate: float = 0.0
    percentiles_ms: dict[str, float] = {}


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout with the schedulers' recent measurements of its versions; ``figures`` is empty after
    its end."""

    rollout: Rollout
    figures: tuple[VersionFigures, ...] = ()


class StartRolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to move the traffic of a model to ``version`` (``name@version``), as described in
    ``Rollout``. Without ``canary_percent``, all traffic moves at once when a worker of the version
    is up."""

    version: str
    canary_percent: float = 100.0
    step_percent: float = 20.0
    interval_s: float = 300.0
    min_requests: int = 10
    abort_if: str = ""


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    """Latest rollout of each model that has had a rollout, by name."""

    data: tuple[RolloutReport, ...]
    object: Literal["list"] = "list"


class RolloutConflictError(MillraceError, code="rollout_conflict", http_status=409):
    """Error for a command that conflicts with the state of the model's versions."""


class RolloutNotFoundError(MillraceError, code="rollout_not_found", http_status=404):
    """Error for a model that has had no rollout."""

    def __init__(self, model: str) -> None:
        super().__init__(f"There is no rollout of {model!r:.200}.")
