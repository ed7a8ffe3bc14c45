"""Progress of the sink's group: each partition's end and stored position, and a rebalance that
waits for the current batch."""

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
    """Known positions of every partition of the record topics, including those of other members.

    A partition of this member is stored up to its position as of the last batch; another member's
    up to its committed offset. Kept while Kafka is unreachable.
    """

    def __init__(self) -> None:
        self._stored: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}

    def lag(self) -> dict[str, int]:
        """Return the number of messages in Kafka that are not in ClickHouse yet, by topic. Unknown
        topics are missing."""
        behind: Counter[str] = Counter()
        for partition, end in self._ends.items():
            behind[partition.topic] += max(0, end - self._stored.get(partition, 0))
        return dict(behind)

    def num_behind(self, ends: Offsets) -> int:
        """Return the number of messages before these offsets that are not stored yet."""
        return sum(max(0, end - self._stored.get(partition, 0)) for partition, end in ends.items())

    def note_stored(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that every message before these offsets is stored."""
        self._stored.update(offsets)

    def note_ends(self, offsets: Offsets) -> None:
        """Note that the partitions reach at least to these offsets."""
        for partition, end in offsets.items():
            self._ends[partition] = max(end, self._ends.get(partition, 0))

    async def note_positions(self, consumer: AIOKafkaConsumer) -> None:
        """Note that all messages consumed by this member are stored.

        Messages before a partition's position were stored by this run or an earlier one.
        """
        for partition in consumer.assignment():
            try:
                async with asyncio.timeout(_POSITION_TIMEOUT_S):
                    self._stored[partition] = await consumer.position(partition)
            except (TimeoutError, IllegalStateError):
                logger.debug("a partition is changing hands", extra={"partition": str(partition)})

    async def refresh(self, consumer: AIOKafkaConsumer) -> None:
        """Ask Kafka for the ends of the partitions and other members' committed offsets. Values
        without an answer stay."""
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
        """Forget all positions, since Kafka was replaced."""
        self._stored.clear()
        self._ends.clear()


# The broker waits longer for a member to join again (see ``telemetry.kafka.kafka``).
_BATCH_TIMEOUT_S = 5.0
# A group without an assignment by then may have failed at it, which it reports only to members that
# continue to read.
_REBALANCE_TIMEOUT_S = 45.0


class RebalanceListener(ConsumerRebalanceListener):  # type: ignore[misc]  # untyped base
    """Listener that releases partitions once their messages are stored and committed, so that their
    next owner does not read them again.

    This is an optimisation: if the store delays a batch too long, the partition is released early,
    both owners store its rows, and the rows merge.
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
        """True if partitions are about to change owners, so that they should not be read."""
        if self._assigned.is_set():
            return False
        return self._clock.monotonic() - self._pending_since_s < _REBALANCE_TIMEOUT_S

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Mark a batch as in progress."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the partitions are assigned anew, or for ``timeout_s``."""
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
