"""All tenant queues of one model as one queue, for workers that pull for themselves, fair or
not."""

from __future__ import annotations

import asyncio

from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.transport import Subscription
from millrace.schemas.errors import BusUnavailableError

# What is delivered again is not announced, nor what came while the server was unreachable.
_LOOK_S = 0.5


class ModelQueue:
    """Owns its subscription; ``close`` ends it."""

    def __init__(self, bus: Bus, model: str) -> None:
        self._bus = bus
        self._model = model
        self._waiting: dict[TenantQueue, None] = {}
        self._told = asyncio.Event()
        self._watching: Subscription | None = None

    async def close(self) -> None:
        if self._watching is not None:
            await self._watching.close()

    async def pull(self, max_jobs: int, timeout_s: float) -> list[LeasedJob]:
        """Up to ``max_jobs`` jobs, as soon as there is one; none after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        if self._watching is None:
            self._watching = await self._bus.jobs.watch(self._on_published)
            await self._look()
        while True:
            self._told.clear()
            taken = await self._take(max_jobs)
            left_s = deadline_s - loop.time()
            if taken or left_s <= 0:
                return taken
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._told.wait()
            except TimeoutError:
                await self._look()

    async def _take(self, max_jobs: int) -> list[LeasedJob]:
        taken: list[LeasedJob] = []
        for tenant_queue in list(self._waiting):
            num_wanted = max_jobs - len(taken)
            if num_wanted <= 0:
                break
            del self._waiting[tenant_queue]
            pulled = await self._bus.jobs.pull(tenant_queue, num_wanted, 0.0)
            if len(pulled) == num_wanted:
                self._waiting[tenant_queue] = None
            taken += pulled
        return taken

    async def _look(self) -> None:
        try:
            tenant_queues = await self._bus.jobs.tenant_queues()
        except BusUnavailableError:
            return  # unreachable: the next look finds it
        for tenant_queue in tenant_queues:
            self._on_published(tenant_queue)

    def _on_published(self, tenant_queue: TenantQueue) -> None:
        if tenant_queue.model == self._model:
            self._waiting[tenant_queue] = None
            self._told.set()


async def pull_one(bus: Bus, model: str, timeout_s: float = 20.0) -> LeasedJob:
    """The next job of a model, whosever it is."""
    queue = ModelQueue(bus, model)
    try:
        (leased,) = await queue.pull(1, timeout_s)
    finally:
        await queue.close()
    return leased
