"""How traffic moves from one version of a model to another, as the parts of the system tell it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from millrace.schemas.errors import MillraceError


class RolloutState(StrEnum):
    """``waiting``: for a worker of the new version, so it has no traffic. ``aborted``: all traffic
    is the old version's again. ``completed``: it is the new version's."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The latest rollout of ``model``, a name that stands for several versions.

    Requests for ``model`` go to ``stable``, but for ``percent`` of them that go to ``candidate``
    while it runs; both are names in the catalogue. It begins with ``canary_percent`` and grows by
    ``step_percent`` each ``interval_s`` in which at least ``min_requests`` of the candidate have
    ended and ``abort_if`` (see ``registry.rollouts.abort_rule``; empty: nothing) did not hold. Once
    completed, the candidate is ``stable`` and ``former`` what was so before. ``reason`` says why it
    was aborted. ``stepped_ns`` is when the share changed last; ``revision`` rises with each change.
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
        """Whether it goes on."""
        return self.state in (RolloutState.WAITING, RolloutState.RUNNING)


class VersionFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was seen of a version since the share changed last, in ``num_requests`` that have ended.
    Percentiles, by names such as ``ttft_p95``, are in milliseconds."""

    version: str
    num_requests: int = 0
    error_rate: float = 0.0
    percentiles_ms: dict[str, float] = {}


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout and what schedulers saw of its versions lately; no ``figures`` after its end."""

    rollout: Rollout
    figures: tuple[VersionFigures, ...] = ()


class StartRolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move the traffic of a model to ``version`` (``name@version``), as ``Rollout`` says; without
    ``canary_percent`` all of it at once, when a worker of the version is up."""

    version: str
    canary_percent: float = 100.0
    step_percent: float = 20.0
    interval_s: float = 300.0
    min_requests: int = 10
    abort_if: str = ""


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    """The latest rollout of each model that has had one, by name."""

    data: tuple[RolloutReport, ...]
    object: Literal["list"] = "list"


class RolloutConflictError(MillraceError, code="rollout_conflict", http_status=409):
    """What was asked for does not go with how the versions of the model stand."""


class RolloutNotFoundError(MillraceError, code="rollout_not_found", http_status=404):
    """The model has had no rollout."""

    def __init__(self, model: str) -> None:
        super().__init__(f"There is no rollout of {model!r:.200}.")
