"""Keeps the leases of all that a worker holds, in one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from bus.api import JobQueue
from runtime.clock import Clock
from schemas.errors import MillraceError

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Extends each held lease every ``interval_s``, and at once when the bus came back."""

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
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """The connection was away: the leases may be about to lapse."""
        self._hurry.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._extend_in_time(), name="extend leases")
            group.create_task(self._extend_in_a_hurry(), name="extend leases at once")

    async def _extend_in_time(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self._extend()

    async def _extend_in_a_hurry(self) -> None:
        while True:
            await self._hurry.wait()
            self._hurry.clear()
            await self._extend()

    async def _extend(self) -> None:
        for lease in list(self._held()):
            try:
                await self._jobs.extend(lease)
            except MillraceError as error:
                logger.warning("leases could not be extended", extra={"code": error.code})
                return
