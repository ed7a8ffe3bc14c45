"""Cancels by the services of tenants, kept where they outlive every scheduler."""

from __future__ import annotations

from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.cancel_memory import CancelMemory
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.schemas.control import Cancel

# The clocks of this process and of the NATS server, which dates jobs, may differ by this much.
_CLOCKS_DIFFER_NS = 5_000_000_000


class KeptCancels:
    """Notes cancels of jobs that are not here in the index, and recalls those of jobs that were
    published while this process did not hear cancels: before its start, or before its connection
    came back."""

    def __init__(
        self, index: RunningRequests, memory: CancelMemory, clock: Clock, tasks: Tasks
    ) -> None:
        self._index = index
        self._memory = memory
        self._clock = clock
        self._tasks = tasks
        self._hears_since_ns = clock.now_ns()

    def reconnected(self) -> None:
        """Cancels that were sent meanwhile were not heard."""
        self._hears_since_ns = self._clock.now_ns()

    def note(self, cancel: Cancel) -> None:
        """Keep a cancel by a service."""
        if cancel.tenant:
            noting = self._index.note_cancel(cancel.tenant, cancel.request_id)
            self._tasks.spawn(noting, f"note the cancel of {cancel.request_id}")

    async def recall(self, scheduled: ScheduledJob) -> None:
        """Have the memory know whether the service of its tenant cancelled a job."""
        is_heard = scheduled.timing.stored_ns >= self._hears_since_ns + _CLOCKS_DIFFER_NS
        if is_heard or scheduled.lease.tenant_queue.reserved:
            return
        tenant, request_id = scheduled.job.tenant, scheduled.request_id
        if await self._index.was_cancelled(tenant, request_id):
            cancel = Cancel(request_id=request_id, tenant=tenant)
            self._memory.add(cancel, self._clock.monotonic())
