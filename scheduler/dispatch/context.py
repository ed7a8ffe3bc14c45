"""What the parts of one scheduler share."""

from __future__ import annotations

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.cancel_memory import CancelMemory
from millrace.scheduler.jobs.finalizer import Finalizer
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import JobTable, ScheduledJob
from millrace.scheduler.jobs.terminal_status import EXPIRED, TerminalStatus, cancelled
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.placement.prefix_index import PrefixIndex
from millrace.schemas.config import SchedulerConfig


class SchedulerContext:
    """One of each. ``tasks`` owns the work on single jobs; without an ``admission`` every job is
    admitted."""

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        clock: Clock,
        running_requests: RunningRequests,
        finalizer: Finalizer,
        traces: JobTraces | None,
        admission: JobAdmission | None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.clock = clock
        self.running_requests = running_requests
        self.finalizer = finalizer
        self.traces = traces
        self.admission = admission
        self.fleet = Fleet(config.heartbeat_timeout_s)
        self.prefixes = PrefixIndex(config.max_prefix_keys)
        self.cancels = CancelMemory(config.cancel_memory_s)
        self.job_table = JobTable()
        self.tasks = Tasks()

    def why_unwanted(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why nobody waits for this job any more, if so."""
        reason = self.cancels.reason(scheduled.request_id, self.clock.monotonic())
        if reason is not None:
            return cancelled(reason)
        deadline_ns = scheduled.job.deadline_ns
        if deadline_ns is not None and self.clock.now_ns() >= deadline_ns:
            return EXPIRED
        return None
