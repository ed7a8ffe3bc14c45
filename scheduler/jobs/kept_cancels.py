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
# Cancels of one tenant that wait for Redis, and cancels that one call to Redis notes.
_MAX_UNNOTED = 1_000


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
        self._unnoted: dict[str, dict[str, None]] = {}
        self._is_noting = False

    def reconnected(self) -> None:
        """Cancels that were sent meanwhile were not heard."""
        self._hears_since_ns = self._clock.now_ns()

    def note(self, cancel: Cancel) -> None:
        """Keep a cancel by a service. Of a tenant that sends cancels faster than Redis takes them,
        the newest are kept."""
        if not cancel.tenant:
            return
        unnoted = self._unnoted.setdefault(cancel.tenant, {})
        unnoted[cancel.request_id] = None
        if len(unnoted) > _MAX_UNNOTED:
            del unnoted[next(iter(unnoted))]
        if not self._is_noting:
            self._is_noting = True
            self._tasks.spawn(self._note_all(), "note cancels")

    async def _note_all(self) -> None:
        try:
            while self._unnoted:
                tenant = next(iter(self._unnoted))
                await self._index.note_cancels(tenant, list(self._unnoted.pop(tenant)))
        finally:
            self._is_noting = False

    async def recall(self, scheduled: ScheduledJob) -> None:
        """Have the memory know whether the service of its tenant cancelled a job."""
        is_heard = scheduled.timing.stored_ns >= self._hears_since_ns + _CLOCKS_DIFFER_NS
        if is_heard or scheduled.lease.tenant_queue.reserved:
            return
        tenant, request_id = scheduled.job.tenant, scheduled.request_id
        if await self._index.was_cancelled(tenant, request_id):
            cancel = Cancel(request_id=request_id, tenant=tenant)
            self._memory.add(cancel, self._clock.monotonic())
