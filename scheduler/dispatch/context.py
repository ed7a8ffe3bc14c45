"""What the parts of one scheduler share."""

from __future__ import annotations

from millrace.bus.api import Bus
from millrace.bus.job_queue import IsForeignReply
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.cancel_memory import CancelMemory
from millrace.scheduler.jobs.finalizer import Finalizer
from millrace.scheduler.jobs.kept_cancels import KeptCancels
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import JobTable, ScheduledJob
from millrace.scheduler.jobs.tenant_lines import TenantLines
from millrace.scheduler.jobs.terminal_status import EXPIRED, TerminalStatus, cancelled, refused
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.placement.prefix_index import PrefixIndex
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import ModelNotFoundError


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
        is_foreign_reply: IsForeignReply,
    ) -> None:
        self.bus = bus
        self.config = config
        self.clock = clock
        self.running_requests = running_requests
        self.finalizer = finalizer
        self.traces = traces
        self.admission = admission
        self.is_foreign_reply = is_foreign_reply
        self.fleet = Fleet(config.heartbeat_timeout_s)
        self.prefixes = PrefixIndex(config.max_prefix_keys)
        self.cancels = CancelMemory(config.cancel_memory_s)
        self.job_table = JobTable()
        self.tasks = Tasks()
        self.kept_cancels = KeptCancels(running_requests, self.cancels, clock, self.tasks)
        self.lines = TenantLines(admission, clock, self.tasks)
        self.withdrawn_models: set[str] = set()  # not served any more

    def cancel_reason(self, scheduled: ScheduledJob) -> CancelReason | None:
        """Why the job was cancelled; None if it was not."""
        tenant, request_id = scheduled.job.tenant, scheduled.request_id
        return self.cancels.reason(tenant, request_id, self.clock.monotonic())

    def why_unwanted(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why nobody waits for this job any more, if so."""
        reason = self.cancel_reason(scheduled)
        if reason is not None:
            return cancelled(reason)
        if scheduled.job.is_past_deadline(self.clock.now_ns()):
            return EXPIRED
        if scheduled.job.model in self.withdrawn_models:
            return refused(
                ModelNotFoundError(f"The model {scheduled.job.model!r} is served no more.")
            )
        return None
