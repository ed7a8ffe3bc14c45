"""From the outbox to Kafka: a record is acknowledged in the outbox only after Kafka has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition

from bus import subjects
from bus.api import Bus, OutboxMessage
from bus.clock import Clock
from schemas.config import KafkaConfig
from telemetry.dead_letters import DeadLetters
from telemetry.kafka import (
    SEQUENCE_HEADER,
    SUBJECT_HEADER,
    Incarnation,
    Offsets,
    ensure_topics,
    make_producer,
    stop_client,
)
from telemetry.ledger import Ledger

logger = logging.getLogger(__name__)

_PULL_RECORDS = 500
_PULL_TIMEOUT_S = 0.5
_CHECK_INTERVAL_S = 2.0
_COMPACTION_INTERVAL_S = 60.0
# The embedded cluster drops a partition's oldest messages past 5 MB: more than this is not put
# into it before the sink has caught up. The outbox holds the rest.
_VOLATILE_BACKLOG = 6_000
_BACKLOG_POLL_S = 0.05


class _Key(msgspec.Struct):
    """What a record is keyed by in Kafka; the other fields are the sink's business."""

    request_id: str = ""
    worker_id: str = ""


_KEYS = msgspec.msgpack.Decoder(_Key)


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Once the sink has stored everything before ``ends``, all up to ``sequence`` has landed."""

    sequence: int
    ends: Offsets


class Bridge:
    """Moves records and watches that none is lost on the way.

    Kafka may forget (the embedded cluster is volatile) and a former bridge may have died holding
    records. Whenever the sink has stored all that Kafka held and the ledger's mark is still below
    what was sent, the outbox is rewound to the mark: the tables merge what comes twice.
    """

    def __init__(
        self,
        bus: Bus,
        config: KafkaConfig,
        ledger: Ledger,
        clock: Clock,
        num_behind: Callable[[Offsets], int],
        on_new_cluster: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._config = config
        self._ledger = ledger
        self._clock = clock
        self._num_behind = num_behind
        self._on_new_cluster = on_new_cluster
        self._stopping = False
        self._ends: dict[TopicPartition, int] = {}
        self._bridged_sequence = 0
        self._promise: Promise | None = None
        self._rewound_to: int | None = None
        self.num_bridged = 0

    def stop(self) -> None:
        """End after the batch in hand."""
        self._stopping = True

    async def run(self) -> None:
        """Bridge until ``stop``; raises what Kafka, the bus or the store raises."""
        is_durable = await ensure_topics(self._config)
        producer = make_producer(self._config)
        await producer.start()
        try:
            await self._begin(producer)
            dead_letters = DeadLetters(producer)
            next_check_s = self._clock.monotonic() + _CHECK_INTERVAL_S
            next_compaction_s = self._clock.monotonic() + _COMPACTION_INTERVAL_S
            while not self._stopping:
                if not is_durable and self._num_behind(self._ends) > _VOLATILE_BACKLOG:
                    await self._clock.sleep(_BACKLOG_POLL_S)
                    continue
                messages = await self._bus.outbox.pull(_PULL_RECORDS, _PULL_TIMEOUT_S)
                await self._note_delivery(messages)
                if messages:
                    await self._send(producer, dead_letters, messages)
                    await self._bus.outbox.ack(messages)
                    self.num_bridged += len(messages)
                if self._clock.monotonic() >= next_check_s:
                    await self._check()
                    next_check_s = self._clock.monotonic() + _CHECK_INTERVAL_S
                if self._clock.monotonic() >= next_compaction_s:
                    # Here, where the ledger is also cleared: neither may undo the other.
                    await self._ledger.compact()
                    next_compaction_s = self._clock.monotonic() + _COMPACTION_INTERVAL_S
        finally:
            await stop_client(producer)

    async def _begin(self, producer: AIOKafkaProducer) -> None:
        incarnation = Incarnation(self._config)
        known, self._ends = await incarnation.look()
        self._promise = None
        self._bridged_sequence = 0
        if await self._bus.outbox.last_sequence() < await self._ledger.mark():
            logger.warning("the outbox has been made anew: the ledger starts again")
            await self._ledger.clear()
        else:
            await self._ledger.compact()
        if not known or await self._ledger.is_empty():
            await self._rewind()
        if not known:
            self._on_new_cluster()
            await incarnation.sign(producer)

    async def _rewind(self) -> None:
        mark = await self._ledger.mark()
        await self._bus.outbox.rewind(mark)
        self._rewound_to = mark
        self._promise = None
        logger.info("the outbox is replayed", extra={"after_sequence": mark})

    async def _note_delivery(self, messages: list[OutboxMessage]) -> None:
        if self._rewound_to is not None and messages:
            first = min(message.sequence for message in messages)
            if first > self._rewound_to + 1:
                # The outbox is asked for all after the mark and answers in order: what it skips
                # has grown too old and is not there any more.
                logger.warning(
                    "records grew too old in the outbox before they were stored",
                    extra={"first_sequence": self._rewound_to + 1, "last_sequence": first - 1},
                )
                await self._ledger.void(self._rewound_to + 1, first - 1)
            self._rewound_to = None
        if self._bridged_sequence == 0:
            # All before what the outbox delivers first has been delivered to somebody before.
            self._bridged_sequence = (
                messages[0].sequence - 1 if messages else await self._bus.outbox.last_sequence()
            )

    async def _send(
        self,
        producer: AIOKafkaProducer,
        dead_letters: DeadLetters,
        messages: list[OutboxMessage],
    ) -> None:
        sent = []
        unroutable = []
        for message in messages:
            try:
                topic = subjects.topic(message.subject)
            except KeyError:
                unroutable.append(message)
                continue
            headers = [
                (SEQUENCE_HEADER, str(message.sequence).encode()),
                (SUBJECT_HEADER, message.subject.encode()),
            ]
            sent.append(
                await producer.send(topic, message.payload, key=_key(message), headers=headers)
            )
        for metadata in await asyncio.gather(*sent):
            partition = TopicPartition(metadata.topic, metadata.partition)
            self._ends[partition] = metadata.offset + 1
        if unroutable:
            for message in unroutable:
                await dead_letters.send(
                    message.payload,
                    reason=f"no topic for subject {message.subject}",
                    sequence=message.sequence,
                )
            await self._ledger.add([message.sequence for message in unroutable])
        self._bridged_sequence = max(self._bridged_sequence, messages[-1].sequence)

    async def _check(self) -> None:
        promise = self._promise
        if promise is None:
            self._promise = Promise(sequence=self._bridged_sequence, ends=dict(self._ends))
        elif self._num_behind(promise.ends) == 0:
            self._promise = None
            if await self._ledger.mark() < promise.sequence:
                await self._rewind()


def _key(message: OutboxMessage) -> bytes | None:
    """The request's id, or the worker's; None for what is no record: the sink will say why."""
    try:
        key = _KEYS.decode(message.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (key.request_id or key.worker_id).encode("utf-8", "surrogatepass") or None
