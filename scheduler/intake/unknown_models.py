"""Answers jobs of models that are not in the catalogue, which no puller would ever pull."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.scheduler.jobs.scheduled_job import ScheduledJob, TenantQueueCounts
from millrace.scheduler.stages import prepare
from millrace.scheduler.state import SchedulerState
from millrace.schemas.errors import ModelNotFoundError

_MAX_AT_ONCE = 64


class UnknownModelJobs:
    """``known_models`` is the whole catalogue, which may change."""

    def __init__(self, state: SchedulerState, known_models: Collection[str]) -> None:
        self._state = state
        self.known_models = frozenset(known_models)

    async def look(self, tenant_queues: Iterable[TenantQueue]) -> None:
        """Refuse what waits in those of unknown models. Raises BusUnavailableError."""
        jobs = self._state.bus.jobs
        for tenant_queue in tenant_queues:
            if tenant_queue.model not in self.known_models:
                for leased in await jobs.pull(tenant_queue, _MAX_AT_ONCE, 0.0):
                    await self._refuse(leased)
                await jobs.forget_tenant_queue(tenant_queue)

    async def _refuse(self, leased: LeasedJob) -> None:
        known = ", ".join(sorted(self.known_models))
        error = ModelNotFoundError(
            f"There is no model {leased.job.model!r} here. The models are: {known}."
        )
        scheduled = ScheduledJob.of(leased, TenantQueueCounts(), self._state.clock.monotonic())
        await prepare.refuse(self._state, scheduled, error)
