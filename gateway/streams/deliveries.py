"""Delivery records on their way to the outbox, off the path of the streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from millrace.bus.api import Outbox
from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays, is_retryable, retry
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import MillraceError
from millrace.schemas.records import DeliveryRecord

_log = logging.getLogger(__name__)

_MAX_WAITING = 10_000
_NUM_SENDERS = 8
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0


class Deliveries:
    """Publishes records in the background, each tried until it is stored; ``num_lost`` counts those
    that found too many waiting, or that the outbox will never take.

    Owns its sender tasks: ``start`` makes them, ``close`` waits a moment for what is queued and
    ends them.
    """

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._waiting: asyncio.Queue[DeliveryRecord] = asyncio.Queue(_MAX_WAITING)
        self._senders = Tasks()
        self.num_lost = 0

    def start(self) -> None:
        for _ in range(_NUM_SENDERS):
            self._senders.keep(self._send_all, self._clock, "send delivery records")

    def put(self, record: DeliveryRecord) -> None:
        """Queue a record; never waits. A full queue (the bus is unreachable for long) loses it."""
        try:
            self._waiting.put_nowait(record)
        except asyncio.QueueFull:
            self._lose(record, "too many records wait for the bus")

    async def close(self, timeout_s: float) -> None:
        """Send what is queued for up to ``timeout_s``, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._waiting.join()
        await self._senders.close()

    async def _send_all(self) -> None:
        while True:
            record = await self._waiting.get()
            try:
                await self._send(record)
            except Exception:
                self._lose(record, "it could not be sent")
                raise
            finally:
                self._waiting.task_done()

    async def _send(self, record: DeliveryRecord) -> None:
        delays = doubling_delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        try:
            await retry(
                lambda: self._outbox.publish(record), delays, self._clock.sleep, retried=_may_pass
            )
        except MillraceError as error:
            self._lose(record, str(error))

    def _lose(self, record: DeliveryRecord, why: str) -> None:
        self.num_lost += 1
        _log.warning(
            "a delivery record was lost", extra={"request_id": record.request_id, "why": why}
        )


def _may_pass(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or is_retryable(error)
