"""The sink's group: where each partition ends, up to where it is stored, and a rebalance that waits
for the batch in hand."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from millrace.bus import subjects
from millrace.runtime.clock import Clock
from millrace.telemetry.kafka.kafka import Offsets

logger = logging.getLogger(__name__)

_POSITION_TIMEOUT_S = 0.5
_REFRESH_TIMEOUT_S = 5.0


class SinkProgress:
    """What is known of every partition of the record topics, those of other members included.

    A partition that this member consumes is stored up to its position as of the last batch; one of
    another member up to what that member has committed. Kept while Kafka is unreachable.
    """

    def __init__(self) -> None:
        self._stored: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}

    def lag(self) -> dict[str, int]:
        """Messages in Kafka that are not in ClickHouse yet, by topic. A topic of which nothing is
        known yet is missing."""
        behind: Counter[str] = Counter()
        for partition, end in self._ends.items():
            behind[partition.topic] += max(0, end - self._stored.get(partition, 0))
        return dict(behind)

    def num_behind(self, ends: Offsets) -> int:
        """How many messages before these offsets are not stored yet."""
        return sum(max(0, end - self._stored.get(partition, 0)) for partition, end in ends.items())

    def note_stored(self, offsets: Mapping[TopicPartition, int]) -> None:
        """All before these offsets is stored."""
        self._stored.update(offsets)

    def note_ends(self, offsets: Offsets) -> None:
        """The partitions reach at least to these offsets."""
        for partition, end in offsets.items():
            self._ends[partition] = max(end, self._ends.get(partition, 0))

    async def note_positions(self, consumer: AIOKafkaConsumer) -> None:
        """All that this member has consumed is stored. What lies before a partition's position
        has been stored by this life or one before it."""
        for partition in consumer.assignment():
            try:
                async with asyncio.timeout(_POSITION_TIMEOUT_S):
                    self._stored[partition] = await consumer.position(partition)
            except (TimeoutError, IllegalStateError):
                logger.debug("a partition is changing hands", extra={"partition": str(partition)})

    async def refresh(self, consumer: AIOKafkaConsumer) -> None:
        """Ask Kafka where the partitions end, and what other members have committed. What it does
        not answer stays as it was."""
        partitions = [
            TopicPartition(topic, number)
            for topic in subjects.RECORD_TOPICS
            for number in consumer.partitions_for_topic(topic) or ()
        ]
        if not partitions:
            return
        try:
            async with asyncio.timeout(_REFRESH_TIMEOUT_S):
                ends = await consumer.end_offsets(partitions)
                for partition in partitions:
                    if partition not in consumer.assignment():
                        self._stored[partition] = await consumer.committed(partition) or 0
        except (TimeoutError, KafkaError) as error:
            logger.debug("Kafka does not say where it ends", extra={"reason": str(error)})
            return
        self._ends.update(ends)

    def clear(self) -> None:
        """Kafka is another one: nothing is known of it."""
        self._stored.clear()
        self._ends.clear()


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
