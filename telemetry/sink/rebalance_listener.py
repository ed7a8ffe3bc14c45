"""A rebalance of the sink's group that waits for the batch in hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import ConsumerRebalanceListener, TopicPartition

from millrace.runtime.clock import Clock

logger = logging.getLogger(__name__)

# The broker waits longer for a member to join again (see ``telemetry.kafka.kafka``).
_BATCH_TIMEOUT_S = 5.0
# A group that has not shared the partitions out by then may have failed at it, which it says only
# to those who go on reading.
_REBALANCE_TIMEOUT_S = 45.0


class RebalanceListener(ConsumerRebalanceListener):  # type: ignore[misc]  # untyped base
    """Lets partitions go once what was read of them is stored and committed, so that their next
    owner reads none of it again.

    It is a courtesy: a batch that a store keeps waiting is let go of in the middle, both owners
    store its rows, and they merge.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending_since_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._assigned = asyncio.Event()
        self._assigned.set()

    @property
    def is_pending(self) -> bool:
        """Whether partitions are about to change hands: nothing more is to be read of them."""
        if self._assigned.is_set():
            return False
        return self._clock.monotonic() - self._pending_since_s < _REBALANCE_TIMEOUT_S

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While a batch is in hand."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    async def wait(self, timeout_s: float) -> None:
        """Until the partitions are shared out anew, or for ``timeout_s``."""
        await _within(timeout_s, self._assigned)

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        self._pending_since_s = self._clock.monotonic()
        self._assigned.clear()
        if revoked and not await _within(_BATCH_TIMEOUT_S, self._idle):
            logger.info("partitions change hands in the middle of a batch; its rows will merge")

    async def on_partitions_assigned(self, _: set[TopicPartition]) -> None:
        self._assigned.set()


async def _within(timeout_s: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
