"""Extends the leases of all requests of a worker, in one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from millrace.bus.job_queue import JobQueue
from millrace.runtime.clock import Clock
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Extends each held lease every ``interval_s``, and at once after a reconnect."""

    def __init__(
        self,
        jobs: JobQueue,
        clock: Clock,
        interval_s: float,
        held: Callable[[], Iterable[str]],
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._interval_s = interval_s
        self._held = held
        self._now = asyncio.Event()

    def extend_now(self) -> None:
        """The bus was disconnected: leases may be about to lapse."""
        self._now.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._extend_periodically(), name="extend leases")
            group.create_task(self._extend_on_request(), name="extend leases at once")

    async def _extend_periodically(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self._extend()

    async def _extend_on_request(self) -> None:
        while True:
            await self._now.wait()
            self._now.clear()
            await self._extend()

    async def _extend(self) -> None:
        for lease in list(self._held()):
            try:
                await self._jobs.extend(lease)
            except MillraceError as error:
                logger.warning("leases could not be extended", extra={"code": error.code})
                return
