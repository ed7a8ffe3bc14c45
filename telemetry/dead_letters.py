"""Messages that cannot become rows, kept with the reason on a topic of their own."""

from __future__ import annotations

import logging

from aiokafka import AIOKafkaProducer

from bus import subjects
from telemetry.kafka import SEQUENCE_HEADER

logger = logging.getLogger(__name__)


class DeadLetters:
    """Writes to the dead-letter topic with a producer that somebody else owns."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def send(
        self,
        payload: bytes | None,
        *,
        reason: str,
        sequence: int | None = None,
        key: bytes | None = None,
        origin: tuple[str, int, int] | None = None,
    ) -> None:
        """Returns when Kafka has it. ``origin`` is topic, partition and offset."""
        headers = [("reason", reason.encode())]
        if sequence is not None:
            headers.append((SEQUENCE_HEADER, str(sequence).encode()))
        if origin is not None:
            names = ("origin-topic", "origin-partition", "origin-offset")
            headers += [
                (name, str(part).encode()) for name, part in zip(names, origin, strict=True)
            ]
        await self._producer.send_and_wait(subjects.DEAD_TOPIC, payload, key=key, headers=headers)
        logger.warning(
            "a record cannot be stored; it is among the dead letters",
            extra={"reason": reason, "outbox_sequence": sequence, "origin": origin},
        )
