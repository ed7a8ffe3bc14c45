"""Waiting for the results of jobs that nobody streams."""

from __future__ import annotations

import asyncio

from millrace.bus.api import Bus
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import JobResult

_FIRST_POLL_S = 0.1
_POLL_S = 5.0
_EAGER_S = 0.05
_NUM_EAGER = 10
_LOST_AFTER_S = 60.0


class ResultWaiter:
    """Gets a tenant's results as soon as they are stored.

    It is told of each; what came too early or in an outage is found by looking, soon at first and
    every 5 s later. Owns its subscription; ``close`` ends it.
    """

    def __init__(self, bus: Bus, tenant: str, clock: Clock) -> None:
        self._bus = bus
        self._tenant = tenant
        self._clock = clock
        self._told: dict[str, asyncio.Event] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.results.watch(self._tenant, self._on_stored)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    async def wait(self, request_id: str, sequence: int) -> JobResult | None:
        """The result of the job that the queue has, or had, under ``sequence``; None for a job
        that left the queue and has no result: it was not answered and never will be."""
        told = self._told.setdefault(request_id, asyncio.Event())
        closed_at_s: float | None = None
        linger_s = _FIRST_POLL_S
        try:
            while True:
                now_s = self._clock.monotonic()
                try:
                    result = await self._fetch(request_id, eager=told.is_set())
                except BusUnavailableError:
                    result = None
                    closed_at_s = None if closed_at_s is None else now_s  # the store did not say
                if result is not None:
                    return result
                if closed_at_s is not None and now_s > closed_at_s + _LOST_AFTER_S:
                    return None
                told.clear()
                await wait_or_sleep(told, self._clock, linger_s)
                if told.is_set():
                    continue
                linger_s = min(2 * linger_s, _POLL_S)
                if linger_s == _POLL_S and closed_at_s is None and await self._is_gone(sequence):
                    # Whoever took it out of the queue may be about to store its result.
                    closed_at_s = self._clock.monotonic()
        finally:
            del self._told[request_id]

    def _on_stored(self, request_id: str) -> None:
        told = self._told.get(request_id)
        if told is not None:
            told.set()

    async def _fetch(self, request_id: str, *, eager: bool) -> JobResult | None:
        """Look it up; ``eager``: it was just sent to the store and must be there in a moment.
        Raises BusUnavailableError."""
        for _ in range(_NUM_EAGER if eager else 1):
            result = await self._bus.results.fetch(self._tenant, request_id)
            if result is not None or not eager:
                return result
            await self._clock.sleep(_EAGER_S)
        return None

    async def _is_gone(self, sequence: int) -> bool:
        """Whether the job has left the queue, as far as anybody can say."""
        try:
            return not await self._bus.jobs.is_open(sequence)
        except BusUnavailableError:
            return False
