"""Bridge from the outbox to Kafka: it acknowledges records in the outbox after Kafka has them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from millrace.bus import subjects
from millrace.bus.api import Bus, OutboxMessage
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks, outcome_unless, wait_or_sleep
from millrace.schemas.config import KafkaConfig
from millrace.schemas.errors import MillraceError
from millrace.telemetry.bridge.producer_batch import Landed, ProducerBatch
from millrace.telemetry.kafka.dead_letters import DeadLetterRecord, RecordDeadLetters
from millrace.telemetry.kafka.kafka import (
    LARGEST_MESSAGE_BYTES,
    Offsets,
    ensure_topics,
    look_at_cluster,
    make_producer,
    sign_cluster,
    stop_client,
)
from millrace.telemetry.store.outbox_ledger import OutboxLedger

# The embedded cluster drops a partition's oldest messages beyond 5 MB. The outbox holds the rest.
_MOST_BYTES = 3_000_000
logger = logging.getLogger(__name__)

_PULL_RECORDS = 1_000
_FIRST_PULL_TIMEOUT_S = 0.5
# After a pull that was not full, wait this long for further records: a pull, a message to Kafka and
# their acknowledgements cost about the same for one record as for hundreds.
_LINGER_S = 0.25
# Pull timeout after all sent records have landed: nothing else is left to do.
_IDLE_PULL_TIMEOUT_S = 30.0
_SHIP_BYTES = 1_000_000
_CHECK_INTERVAL_S = 2.0
_COMPACTION_INTERVAL_S = 60.0
# With fewer records, rewriting the ledger is rarely worth its cost.
_COMPACTION_RECORDS = 500
_LONGEST_COMPACTION_INTERVAL_S = 600.0
_BACKLOG_POLL_S = 0.02
_WATCH_INTERVAL_S = 1.0
_IDLE_WATCH_INTERVAL_S = 10.0
_SLOW_S = 5.0


class InFlightBytes:
    """Bytes of each partition that the sink has not stored yet."""

    def __init__(self, num_behind: Callable[[Offsets], int]) -> None:
        self._num_behind = num_behind
        self._loads: dict[TopicPartition, deque[Landed]] = {}

    def add(self, landed: Mapping[TopicPartition, Landed]) -> None:
        for partition, load in landed.items():
            self._loads.setdefault(partition, deque()).append(load)

    @property
    def is_full(self) -> bool:
        """True if a partition holds its maximum."""
        return any(self._held_bytes(partition) >= _MOST_BYTES for partition in self._loads)

    def _held_bytes(self, partition: TopicPartition) -> int:
        loads = self._loads[partition]
        while loads and self._num_behind({partition: loads[0].end}) == 0:
            loads.popleft()
        return sum(load.num_bytes for load in loads)


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Condition under which records have landed: once the sink has stored everything before
    ``ends``, every record up to ``sequence`` has landed."""

    sequence: int
    ends: Offsets


class Bridge:
    """Bridge that moves records and watches that none is lost on the way.

    Kafka may lose records (the embedded cluster is volatile), and a former bridge may have died
    holding records. If the sink has stored everything in Kafka and the ledger's mark is still below
    the last sent record, the outbox is rewound to the mark. The tables merge duplicates.

    ``num_bridged`` counts records sent to Kafka, ``num_dead`` those sent to the dead letters
    instead. ``num_waiting`` records are in the outbox and not in Kafka yet, as of a second ago, or
    longer while no record comes or NATS is unreachable. ``is_waiting``: all sent records have
    landed and the bridge waits for more. ``on_shipped`` is called with the new ends of the
    partitions that got messages.
    """

    def __init__(
        self,
        bus: Bus,
        config: KafkaConfig,
        ledger: OutboxLedger,
        clock: Clock,
        num_behind: Callable[[Offsets], int],
        on_new_cluster: Callable[[], None],
        on_shipped: Callable[[Offsets], None],
    ) -> None:
        self._bus = bus
        self._config = config
        self._ledger = ledger
        self._clock = clock
        self._num_behind = num_behind
        self._on_new_cluster = on_new_cluster
        self._on_shipped = on_shipped
        self._stopping = asyncio.Event()
        self._landed_sequence = -1
        self.is_waiting = False
        self._counted_s = float("-inf")
        self._ends: dict[TopicPartition, int] = {}
        self._bridged_sequence = 0
        self._promise: Promise | None = None
        self._rewound_to: int | None = None
        self._backlog = InFlightBytes(num_behind)
        self.num_bridged = 0
        self.num_dead = 0
        self.num_waiting = 0
        self._failure = ""
        self._sending_since_s: float | None = None

    @property
    def trouble(self) -> str:
        """Reason why Kafka takes no records; empty while it does."""
        if self._failure:
            return f"takes no records ({self._failure})"
        since_s = self._sending_since_s
        if since_s is not None and self._clock.monotonic() - since_s > _SLOW_S:
            return f"has taken no records for more than {_SLOW_S:.0f} s"
        return ""

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stopping.set()

    async def run(self) -> None:
        """Bridge until ``stop``; raise the errors of Kafka, the bus and the store."""
        try:
            await self._run()
        except (KafkaError, OSError) as error:
            self._failure = type(error).__name__
            raise
        finally:
            self._sending_since_s = None

    async def _run(self) -> None:
        watching = Tasks()
        # Keep counting while Kafka is unreachable.
        watching.repeat(self._count_waiting, _WATCH_INTERVAL_S, self._clock, "bridge-watch")
        try:
            is_durable = await ensure_topics(self._config)
            producer = make_producer(self._config)
            await producer.start()
            try:
                await self._begin(producer)
                self._failure = ""
                await self._move(producer, is_durable=is_durable)
            finally:
                await stop_client(producer)
        finally:
            await watching.close()

    async def _move(self, producer: AIOKafkaProducer, *, is_durable: bool) -> None:
        dead_letters = RecordDeadLetters(producer)
        next_check_s = self._clock.monotonic() + _CHECK_INTERVAL_S
        compacted_s, num_compacted = self._clock.monotonic(), self.num_bridged
        while not self._stopping.is_set():
            if is_durable or not self._backlog.is_full:
                messages = await self._pull(next_check_s - self._clock.monotonic())
                await self._note_delivery(messages)
                for part in _parts(messages):
                    await self._until_room(is_durable=is_durable)
                    await self._ship(producer, dead_letters, part)
                    await self._bus.outbox.ack(part)
                    self.num_bridged += len(part)
                if 0 < len(messages) < _PULL_RECORDS:
                    await wait_or_sleep(self._stopping, self._clock, _LINGER_S)
            else:
                await self._clock.sleep(_BACKLOG_POLL_S)
            if self._clock.monotonic() >= next_check_s:
                await self._check()
                next_check_s = self._clock.monotonic() + _CHECK_INTERVAL_S
            since_s = self._clock.monotonic() - compacted_s
            if _is_worth_compacting(self.num_bridged - num_compacted, since_s):
                # Compact in the task that also clears the ledger, so that neither undoes the other.
                await self._ledger.compact()
                compacted_s, num_compacted = self._clock.monotonic(), self.num_bridged

    @property
    def _has_landed(self) -> bool:
        """True if all sent records are known to be stored."""
        return self._rewound_to is None and self._bridged_sequence <= self._landed_sequence

    async def _pull(self, check_in_s: float) -> list[OutboxMessage]:
        """Return the next messages, or nothing when it is time to check on sent records."""
        self.is_waiting = self._has_landed
        if self.is_waiting:
            timeout_s = _IDLE_PULL_TIMEOUT_S
        elif self._bridged_sequence == 0:
            timeout_s = _FIRST_PULL_TIMEOUT_S
        else:
            timeout_s = max(check_in_s, 0.0)
        try:
            pull = self._bus.outbox.pull(_PULL_RECORDS, timeout_s)
            return await outcome_unless(self._stopping, pull) or []
        finally:
            self.is_waiting = False

    async def _until_room(self, *, is_durable: bool) -> None:
        while not is_durable and self._backlog.is_full and not self._stopping.is_set():
            await self._clock.sleep(_BACKLOG_POLL_S)

    async def _begin(self, producer: AIOKafkaProducer) -> None:
        known, self._ends = await look_at_cluster(self._config)
        self._promise = None
        self._bridged_sequence = 0
        self._landed_sequence = -1
        if await self._bus.outbox.last_sequence() < await self._ledger.mark():
            logger.warning("the outbox was recreated: the ledger starts again")
            await self._ledger.clear()
        else:
            await self._ledger.compact()
        if not known or await self._ledger.is_empty():
            await self._rewind()
        if not known:
            self._on_new_cluster()
            await sign_cluster(producer)
        self._on_shipped(self._ends)

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
                # The outbox delivers everything after the mark in order, so the records that it
                # skips have expired there.
                logger.warning(
                    "records expired in the outbox before they were stored",
                    extra={"first_sequence": self._rewound_to + 1, "last_sequence": first - 1},
                )
                await self._ledger.void(self._rewound_to + 1, first - 1)
            self._rewound_to = None
        if self._bridged_sequence == 0:
            # Records before the outbox's first delivery were delivered earlier.
            self._bridged_sequence = (
                messages[0].sequence - 1 if messages else await self._bus.outbox.last_sequence()
            )

    async def _ship(
        self,
        producer: AIOKafkaProducer,
        dead_letters: RecordDeadLetters,
        messages: Sequence[OutboxMessage],
    ) -> None:
        batch = ProducerBatch(producer)
        letters = []
        for message in messages:
            try:
                topic = subjects.topic(message.subject)
            except KeyError:
                letters.append(_letter(message, f"no topic for subject {message.subject}"))
                continue
            num_bytes = len(message.payload)
            if num_bytes > LARGEST_MESSAGE_BYTES:
                reason = f"it has {num_bytes} bytes, and the limit is {LARGEST_MESSAGE_BYTES}"
                letters.append(_letter(message, reason))
                continue
            await batch.add(topic, message)
        # An idempotent producer retries forever and does not report a missing broker.
        self._sending_since_s = self._clock.monotonic()
        landed = await batch.send()
        self._sending_since_s = None
        self._backlog.add(landed)
        for partition, load in landed.items():
            self._ends[partition] = max(self._ends.get(partition, 0), load.end)
        self._on_shipped({partition: self._ends[partition] for partition in landed})
        if letters:
            await dead_letters.send(letters)
            self.num_dead += len(letters)
            await self._ledger.add([letter.sequence for letter in letters if letter.sequence])
        self._bridged_sequence = max(self._bridged_sequence, messages[-1].sequence)

    async def _check(self) -> None:
        promise = self._promise
        if self._has_landed:
            return
        if promise is None:
            self._promise = Promise(sequence=self._bridged_sequence, ends=dict(self._ends))
        elif self._num_behind(promise.ends) == 0:
            self._promise = None
            mark = await self._ledger.mark()
            if mark < promise.sequence:
                await self._rewind()
            else:
                self._landed_sequence = max(self._landed_sequence, mark)

    async def _count_waiting(self) -> None:
        now_s = self._clock.monotonic()
        # A pull that waits would have returned waiting records.
        is_known = self.is_waiting and not self.num_waiting
        if is_known and now_s - self._counted_s < _IDLE_WATCH_INTERVAL_S:
            return
        self._counted_s = now_s
        try:
            self.num_waiting = await self._bus.outbox.num_waiting()
        except MillraceError as error:
            logger.debug("the outbox does not answer", extra={"reason": error.message})


def _is_worth_compacting(num_records: int, since_s: float) -> bool:
    """Return whether the ledger has grown enough for a compaction."""
    interval_s = (
        _COMPACTION_INTERVAL_S
        if num_records >= _COMPACTION_RECORDS
        else _LONGEST_COMPACTION_INTERVAL_S
    )
    return num_records > 0 and since_s >= interval_s


def _parts(messages: Sequence[OutboxMessage]) -> Iterator[Sequence[OutboxMessage]]:
    """Split messages in order into parts of about ``_SHIP_BYTES``."""
    first, num_bytes = 0, 0
    for number, message in enumerate(messages, start=1):
        num_bytes += len(message.payload)
        if num_bytes >= _SHIP_BYTES or number == len(messages):
            yield messages[first:number]
            first, num_bytes = number, 0


def _letter(message: OutboxMessage, reason: str) -> DeadLetterRecord:
    return DeadLetterRecord(
        payload=message.payload,
        reason=reason,
        sequence=message.sequence,
    )
