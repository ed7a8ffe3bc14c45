"""Messages that cannot become rows, kept with the reason on their own topic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from aiokafka import AIOKafkaProducer, ConsumerRecord

from millrace.bus import subjects
from millrace.telemetry.kafka.kafka import LARGEST_MESSAGE_BYTES, SEQUENCE_HEADER

logger = logging.getLogger(__name__)

_REASON_CHARACTERS = 1_000
_MOST_LOGGED = 10


class DeadLetterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Message with the reason why it cannot be a row. ``origin`` is topic, partition and offset, if
    it was in Kafka; ``topic`` is its topic, if known."""

    payload: bytes
    reason: str
    sequence: int | None = None
    key: bytes | None = None
    topic: str = ""
    origin: tuple[str, int, int] | None = None

    @classmethod
    def of(cls, message: ConsumerRecord, reason: str, sequence: int | None) -> DeadLetterRecord:
        """Make the dead letter of a consumed message."""
        return cls(
            payload=message.value or b"",
            reason=reason,
            sequence=sequence,
            key=message.key,
            topic=message.topic,
            origin=(message.topic, message.partition, message.offset),
        )

    @property
    def is_private(self) -> bool:
        """True if it holds, or may hold, text of a user."""
        return self.topic == subjects.TRANSCRIPTS_TOPIC


class RecordDeadLetters:
    """Writer to the dead-letter topic; the caller owns the producer.

    The text of a transcript is not copied: its letter has only the reason and the origin. The same
    holds for a message that is too large to be sent again.
    """

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def send(self, letters: Sequence[DeadLetterRecord]) -> None:
        """Send letters and wait until Kafka has them all."""
        sent = [
            await self._producer.send(
                subjects.DEAD_TOPIC,
                letter.payload if _is_sendable(letter) else b"",
                key=letter.key,
                headers=_headers(letter),
            )
            for letter in letters
        ]
        await asyncio.gather(*sent)
        for letter in letters[:_MOST_LOGGED]:
            logger.warning(
                "a record cannot be stored and is a dead letter now",
                extra={
                    "reason": _reason(letter),
                    "outbox_sequence": letter.sequence,
                    "origin": letter.origin,
                },
            )
        if len(letters) > _MOST_LOGGED:
            logger.warning(
                "more records of the same batch cannot be stored",
                extra={"num_records": len(letters) - _MOST_LOGGED},
            )


def _is_sendable(letter: DeadLetterRecord) -> bool:
    return not letter.is_private and len(letter.payload) <= LARGEST_MESSAGE_BYTES


def _reason(letter: DeadLetterRecord) -> str:
    if letter.is_private:
        # ClickHouse may quote the row that it rejects.
        return "a transcript does not fit its table"
    return letter.reason[:_REASON_CHARACTERS]


def _headers(letter: DeadLetterRecord) -> list[tuple[str, bytes]]:
    headers = [("reason", _reason(letter).encode(errors="replace"))]
    if letter.sequence is not None:
        headers.append((SEQUENCE_HEADER, str(letter.sequence).encode()))
    if letter.origin is not None:
        names = ("origin-topic", "origin-partition", "origin-offset")
        headers += [
            (name, str(part).encode()) for name, part in zip(names, letter.origin, strict=True)
        ]
    return headers
