"""Cancelled requests: remembered here for a while, and kept where they outlive every scheduler."""

from __future__ import annotations

from collections import OrderedDict

from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.schemas.control import Cancel, CancelReason

_MAX_REMEMBERED = 100_000


class CancelMemory:
    """The last cancels, each for ``memory_s``. Pure: the caller passes the time in.

    Cancels by the services of tenants count for jobs of their tenant. Of each tenant, and of our
    own parts, the last ``max_remembered`` are kept, so that no tenant's cancels push out another's.
    """

    def __init__(self, memory_s: float, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._memory_s = memory_s
        self._max_remembered = max_remembered
        # The tenant whose last cancel is the oldest comes first.
        self._by_tenant: OrderedDict[str, OrderedDict[str, tuple[CancelReason, float]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, cancel: Cancel, now_s: float) -> None:
        """The first reason stays; the time starts anew."""
        cancels = self._by_tenant.setdefault(cancel.tenant, OrderedDict())
        self._by_tenant.move_to_end(cancel.tenant)
        known = cancels.pop(cancel.request_id, None)
        reason = cancel.reason if known is None else known[0]
        cancels[cancel.request_id] = (reason, now_s + self._memory_s)
        while cancels:
            oldest = next(iter(cancels))
            if len(cancels) <= self._max_remembered and cancels[oldest][1] > now_s:
                break
            del cancels[oldest]
        self._forget_tenants(now_s)

    def _forget_tenants(self, now_s: float) -> None:
        """Drop all cancels of tenants that have sent none for ``memory_s``."""
        while self._by_tenant:
            tenant, cancels = next(iter(self._by_tenant.items()))
            if cancels and cancels[next(reversed(cancels))][1] > now_s:
                return
            del self._by_tenant[tenant]

    def reason(self, tenant: str, request_id: str, now_s: float) -> CancelReason | None:
        """Why a request of a tenant is not wanted any more; None: it was not cancelled."""
        for who in ("", tenant):
            cancels = self._by_tenant.get(who)
            known = None if cancels is None else cancels.get(request_id)
            if known is not None and known[1] > now_s:
                return known[0]
        return None


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
