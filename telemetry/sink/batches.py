"""Consumed messages that are not stored yet: rows by table, and malformed messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiokafka import ConsumerRecord, TopicPartition

from millrace.bus import codec
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.records import Record
from millrace.telemetry.kafka.dead_letters import DeadLetterRecord
from millrace.telemetry.kafka.kafka import SEQUENCE_HEADER
from millrace.telemetry.store.tables import Table, check, table_of


class Row(msgspec.Struct, frozen=True, gc=False):
    """Record with its place in the outbox and its Kafka message."""

    record: Record
    sequence: int
    message: ConsumerRecord


class MessageBatch:
    """Consumed messages, in order within each partition."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.poison: list[DeadLetterRecord] = []
        self.next_offsets: dict[TopicPartition, int] = {}
        self.num_messages = 0

    def add(self, partition: TopicPartition, message: ConsumerRecord) -> None:
        """Decode and check a message; set a malformed record aside with the reason."""
        self.num_messages += 1
        self.next_offsets[partition] = message.offset + 1
        sequence: int | None = None
        try:
            sequence = _sequence(message)
            record = codec.RECORD.decode(message.value or b"")
            check(record)
        except MalformedMessageError as error:
            self.poison.append(DeadLetterRecord.of(message, error.message, sequence))
            return
        self.rows.setdefault(table_of(record).name, []).append(Row(record, sequence, message))

    def tables(self) -> Iterator[tuple[Table[Any], list[Row]]]:
        """Return the rows of each table."""
        for rows in self.rows.values():
            yield table_of(rows[0].record), rows

    def sequences(self) -> list[int]:
        """Return the places in the outbox that this batch settles, including malformed messages."""
        settled = [row.sequence for rows in self.rows.values() for row in rows]
        return settled + [item.sequence for item in self.poison if item.sequence is not None]


def content_token(rows: Sequence[Row]) -> str:
    """Return a token of the rows' contents.

    Offsets would not do: after Kafka was wiped they name other rows, and ClickHouse would drop
    these as inserted before.
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(row.sequence.to_bytes(8))
        digest.update(row.message.value)
    return digest.hexdigest()


def _sequence(message: ConsumerRecord) -> int:
    for name, value in message.headers:
        if name == SEQUENCE_HEADER:
            try:
                sequence = int(value)
            except ValueError:
                break
            if 0 < sequence < 1 << 63:
                return sequence
            break
    raise MalformedMessageError(f"the header {SEQUENCE_HEADER} is missing or no sequence number")
