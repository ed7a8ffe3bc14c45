"""What the parts of one scheduler share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bus.api import Bus
from runtime.clock import Clock
from runtime.tasks import Tasks
from scheduler.fleet.fleet import Fleet
from scheduler.jobs.admission import JobAdmission
from scheduler.jobs.cancel_memory import CancelMemory
from scheduler.jobs.finalizer import Finalizer
from scheduler.jobs.scheduled_job import JobTable, ScheduledJob
from scheduler.jobs.terminal_status import EXPIRED, TerminalStatus, cancelled
from scheduler.jobs.tracing import JobTraces
from scheduler.placement.prefix_index import PrefixIndex
from schemas.config import SchedulerConfig


class Known(Protocol):
    """What the index says of a request: who ran it last, at what epoch, and whether it ended."""

    @property
    def worker_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def finished(self) -> bool: ...


class Generations(Protocol):
    """The index of who runs what, as a scheduler uses it; ``bus.running_requests`` is the one."""

    async def lookup(self, request_id: str) -> Known | None:
        """None: nothing is known, or nobody can say."""

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """It is answered, by a worker or by none."""

    async def held_by(self, worker_id: str) -> dict[str, str]:
        """The leases of what a worker runs, by request id, as far as anybody can say. Of some
        another may be the holder by now."""

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        """The model that was first chosen for a request, and why: this one, if none was or nobody
        can say."""


@dataclass
class SchedulerContext:
    """What all parts of one scheduler share. ``tasks`` owns the work on single jobs; without an
    ``admission`` all are let in."""

    bus: Bus
    config: SchedulerConfig
    clock: Clock
    generations: Generations
    fleet: Fleet
    prefixes: PrefixIndex
    cancels: CancelMemory
    finalizer: Finalizer
    traces: JobTraces | None = None
    admission: JobAdmission | None = None
    job_table: JobTable = field(default_factory=JobTable)
    tasks: Tasks = field(default_factory=Tasks)

    def why_unwanted(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why nobody waits for this job any more, if so."""
        reason = self.cancels.reason(scheduled.request_id, self.clock.monotonic())
        if reason is not None:
            return cancelled(reason)
        deadline_ns = scheduled.job.deadline_ns
        if deadline_ns is not None and self.clock.now_ns() >= deadline_ns:
            return EXPIRED
        return None
