"""Cancelled requests: remembered in this process, and stored in Redis."""

from __future__ import annotations

from collections import OrderedDict

from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.schemas.control import Cancel, CancelReason

_MAX_REMEMBERED = 100_000


class CancelMemory:
    """Recent cancels, each kept for ``memory_s``. Pure: the caller passes the time.

    Cancels by a tenant's services count for that tenant's jobs only. The last ``max_remembered``
    are kept for each tenant and for Millrace's own services, so no tenant displaces another's
    cancels.
    """

    def __init__(self, memory_s: float, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._memory_s = memory_s
        self._max_remembered = max_remembered
        # Ordered by each tenant's last cancel, the oldest first.
        self._by_tenant: OrderedDict[str, OrderedDict[str, tuple[CancelReason, float]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, cancel: Cancel, now_s: float) -> None:
        """Record a cancel. The first reason stays, the time starts again."""
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
        """Return why a tenant's request was cancelled; None if it was not."""
        for who in ("", tenant):
            cancels = self._by_tenant.get(who)
            known = None if cancels is None else cancels.get(request_id)
            if known is not None and known[1] > now_s:
                return known[0]
        return None


# Largest expected difference between this process's clock and that of the NATS server, which dates
# jobs.
_CLOCKS_DIFFER_NS = 5_000_000_000
# Cancels of one tenant that wait for Redis, also the most in one call.
_MAX_UNNOTED = 1_000


class KeptCancels:
    """Stored cancels: writes cancels of jobs elsewhere to the index and reads them back.

    It looks up jobs that were published while this process did not hear cancels: before its start,
    or before it reconnected.
    """

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
        """Note a reconnection: cancels sent during the outage were missed."""
        self._hears_since_ns = self._clock.now_ns()

    def note(self, cancel: Cancel) -> None:
        """Store a cancel by a service.

        If a tenant exceeds Redis's speed, its newest cancels are kept.
        """
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
        """Add the stored cancel of a job, if there is one, to the memory."""
        is_heard = scheduled.timing.stored_ns >= self._hears_since_ns + _CLOCKS_DIFFER_NS
        if is_heard or scheduled.lease.tenant_queue.reserved:
            return
        tenant, request_id = scheduled.job.tenant, scheduled.request_id
        if await self._index.was_cancelled(tenant, request_id):
            cancel = Cancel(request_id=request_id, tenant=tenant)
            self._memory.add(cancel, self._clock.monotonic())
