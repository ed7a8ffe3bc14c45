"""How far the sink's group has come: where each partition ends, and up to where it is stored."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from millrace.bus import subjects
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
