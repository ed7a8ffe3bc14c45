"""Which adapter a job has: the one of that name, and of that version to its end."""

from __future__ import annotations

import msgspec

from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.models.adapters import SEPARATOR, Adapter

_RETRY_S = 0.5


class AdapterChooser:
    """Finds adapters in the fleet's directory. One that cannot be asked for a moment is waited for:
    an accepted job is not ended because a store is away."""

    def __init__(self, directory: AdapterDirectory, index: RunningRequests, clock: Clock) -> None:
        self._directory = directory
        self._index = index
        self._clock = clock

    async def choose(self, scheduled: ScheduledJob) -> None:
        """Give a job that names an adapter what workers load for it. A job without a version gets
        that which the adapter has now, or had when another scheduler asked.

        Raises ModelNotFoundError for an adapter that is not there, not of the job's model or not
        for its tenant, which are all the same to whoever asks.
        """
        job = scheduled.job
        if not job.adapter:
            return
        version = job.adapter_version
        adapter = await self._find(scheduled, version)
        if adapter is not None and not version:
            version = await self._index.settle_adapter(job.request_id, adapter.version)
            if version != adapter.version:
                adapter = await self._find(scheduled, version)
        if scheduled.is_ended:
            return
        if adapter is None or adapter.model != job.model or not adapter.is_for(job.tenant):
            name = f"{job.model}{SEPARATOR}{job.adapter}"
            raise ModelNotFoundError(f"There is no model {name!r:.300} here.")
        scheduled.adapter = adapter.ref
        if adapter.version != job.adapter_version:
            scheduled.set_prepared(msgspec.structs.replace(job, adapter_version=adapter.version))

    async def _find(self, scheduled: ScheduledJob, version: str) -> Adapter | None:
        while not scheduled.is_ended:
            try:
                return await self._directory.version(scheduled.job.adapter, version)
            except RedisUnreachableError:
                await self._clock.sleep(_RETRY_S)
        return None
