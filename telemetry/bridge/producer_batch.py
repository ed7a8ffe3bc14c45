"""Batches of outbox messages to Kafka, one for each partition.

A message sent alone costs the producer a future of its own and a large part of the time that
storing it takes; in a batch the cost is negligible.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import RecordMetadata

from millrace.bus.api import OutboxMessage
from millrace.telemetry.kafka.kafka import SEQUENCE_HEADER, SUBJECT_HEADER


class _Key(msgspec.Struct):
    """Fields that make a record's Kafka key; only the sink reads the others."""

    request_id: str = ""
    worker_id: str = ""


_KEYS = msgspec.msgpack.Decoder(_Key)


class Landed(msgspec.Struct, frozen=True):
    """New end of a partition, and the number of bytes sent to it."""

    end: int
    num_bytes: int


class _Load:
    """Batch being filled, with its number of bytes."""

    def __init__(self, builder: BatchBuilder) -> None:
        self.builder = builder
        self.num_bytes = 0

    def take(self, key: bytes | None, message: OutboxMessage, timestamp_ms: int) -> bool:
        """Add a message; return False if there is no room."""
        headers = [
            (SEQUENCE_HEADER, str(message.sequence).encode()),
            (SUBJECT_HEADER, message.subject.encode()),
        ]
        taken = self.builder.append(
            timestamp=timestamp_ms, key=key, value=message.payload, headers=headers
        )
        if taken is not None:
            self.num_bytes += taken.size
        return taken is not None


class ProducerBatch:
    """Messages on their way to Kafka. The caller owns the producer."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._partitions: dict[str, list[int]] = {}
        self._loads: dict[TopicPartition, _Load] = {}
        self._sent: list[tuple[_Load, Awaitable[RecordMetadata]]] = []
        self._timestamp_ms = time.time_ns() // 1_000_000

    async def add(self, topic: str, message: OutboxMessage) -> None:
        """Add a message. Records with the same key go to the same partition, in the order of the
        outbox."""
        key = _key(message)
        partitions = self._partitions.get(topic)
        if partitions is None:
            partitions = sorted(await self._producer.partitions_for(topic))
            self._partitions[topic] = partitions
        number = partitions[zlib.crc32(key or b"") % len(partitions)]
        partition = TopicPartition(topic, number)
        load = self._loads.get(partition)
        if load is not None and load.take(key, message, self._timestamp_ms):
            return
        if load is not None:
            await self._send(partition, load)
        load = self._loads[partition] = _Load(self._producer.create_batch())
        if not load.take(key, message, self._timestamp_ms):
            raise ValueError(f"a message of {len(message.payload)} bytes fits no batch")

    async def send(self) -> dict[TopicPartition, Landed]:
        """Send all batches and wait until Kafka has them; raise the producer's errors."""
        for partition, load in self._loads.items():
            await self._send(partition, load)
        self._loads.clear()
        landed: dict[TopicPartition, Landed] = {}
        metadata = await asyncio.gather(*(future for _, future in self._sent))
        for (load, _), told in zip(self._sent, metadata, strict=True):
            partition = TopicPartition(told.topic, told.partition)
            before = landed.get(partition, Landed(0, 0))
            landed[partition] = Landed(
                end=max(before.end, told.offset + load.builder.record_count()),
                num_bytes=before.num_bytes + load.num_bytes,
            )
        return landed

    async def _send(self, partition: TopicPartition, load: _Load) -> None:
        load.builder.close()
        future = await self._producer.send_batch(
            load.builder, partition.topic, partition=partition.partition
        )
        self._sent.append((load, future))


def _key(message: OutboxMessage) -> bytes | None:
    """Return the request's id, or the worker's; None for a malformed record, which the sink rejects
    with the reason."""
    try:
        key = _KEYS.decode(message.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (key.request_id or key.worker_id).encode("utf-8", "surrogatepass") or None
