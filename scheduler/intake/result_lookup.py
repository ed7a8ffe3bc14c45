"""Lookup of stored results for tenants' services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import SchedulerState
from millrace.schemas.errors import (
    BusUnavailableError,
    ResultNotFoundError,
    ResultNotFoundYetError,
    ResultNotReadyError,
    ResultNotStoredError,
)
from millrace.schemas.jobs import JobResult

# Lookups of one tenant at a time. Further ones are refused.
_MAX_AT_ONCE = 256


class ResultLookup:
    """Lookup of stored results; ``pullers`` count the waiting jobs, whose ids are not visible."""

    def __init__(self, state: SchedulerState, pullers: Mapping[str, JobPuller]) -> None:
        self._state = state
        self._pullers = pullers
        self._num_asked: Counter[str] = Counter()

    async def find(self, tenant: str, request_id: str) -> JobResult:
        """Return the stored result of a tenant's request.

        Raises:
            ResultNotReadyError: The request waits or runs.
            ResultNotStoredError: The request ended without a result.
            ResultNotFoundError: No such request is known.
            BusUnavailableError: The bus is unreachable, or the tenant asks for too many at once.
        """
        if self._num_asked[tenant] >= _MAX_AT_ONCE:
            raise BusUnavailableError(
                f"Tenant {tenant} asks for more than {_MAX_AT_ONCE} results at once. Ask again "
                "when some of them are answered."
            )
        self._num_asked[tenant] += 1
        try:
            return await self._find(tenant, request_id)
        finally:
            self._num_asked[tenant] -= 1
            if not self._num_asked[tenant]:
                del self._num_asked[tenant]

    async def _find(self, tenant: str, request_id: str) -> JobResult:
        # Find the request first, then its result: it may end between the two.
        is_here = self._is_here(tenant, request_id)
        has_ended = await self._state.running_requests.has_ended(tenant, request_id)
        result = await self._state.bus.results.fetch(tenant, request_id)
        if result is not None:
            return result
        if has_ended:
            raise ResultNotStoredError(request_id)
        if is_here or has_ended is not None:
            raise ResultNotReadyError(request_id)
        num_waiting = self._num_waiting(tenant)
        if num_waiting:
            raise ResultNotFoundYetError(request_id, num_waiting)
        raise ResultNotFoundError(request_id)

    def _is_here(self, tenant: str, request_id: str) -> bool:
        scheduled = self._state.job_table.get(request_id)
        return scheduled is not None and scheduled.job.tenant == tenant

    def _num_waiting(self, tenant: str) -> int:
        return sum(
            puller.backlog.num_waiting(tenant_queue)
            for puller in self._pullers.values()
            for tenant_queue in puller.backlog.tenant_queues()
            if tenant_queue.tenant == tenant
        )
