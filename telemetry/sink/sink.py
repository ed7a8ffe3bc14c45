"""Sink from Kafka into ClickHouse: it writes batches, and commits offsets only after the rows are
in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError, IllegalStateError

from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.schemas.config import KafkaConfig, TelemetryConfig
from millrace.schemas.records import RequestRecord
from millrace.telemetry.kafka.dead_letters import DeadLetterRecord, RecordDeadLetters
from millrace.telemetry.kafka.kafka import (
    Offsets,
    ensure_topics,
    make_producer,
    start_consumer,
    stop_client,
)
from millrace.telemetry.sink.batches import MessageBatch
from millrace.telemetry.sink.insertion import Insertion
from millrace.telemetry.sink.merging import merge_generations
from millrace.telemetry.sink.progress import RebalanceListener, SinkProgress
from millrace.telemetry.sink.tracing import StoredTraces
from millrace.telemetry.store.outbox_ledger import OutboxLedger
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import GENERATION_ROWS, WORKER_SAMPLES

logger = logging.getLogger(__name__)

_POLL_MOST_S = 0.2
_POLL_MESSAGES = 1_000
_REFRESH_INTERVAL_S = 1.0
# While idle, look at Kafka this often, for messages that bypassed the bridge. After the short rest,
# when all is committed, release the partitions.
_LONGEST_REST_S = 30.0
_SHORT_REST_S = 5.0
_CATCH_UP_FACTOR = 4
# An insert takes about as long for one row as for a thousand. With few rows, batches are spaced so
# that storing takes this share of the time. Even then a row is stored within so many intervals: it
# may wait for one batch to be stored, for the rest, and for its own batch.
_SPARSE_SHARE = 0.02
_SPARSE_INTERVALS = 6


class Sink:
    """Member of the consumer group.

    A batch is stored table by table, then entered in the ledger, then committed. After a failure in
    between it is stored again: rows merge by identity, the ledger's ranges by overlap.
    ``on_stored`` is called with the ``done_ns`` of requests that have just landed, ``on_sampled``
    after samples of workers have, ``traces`` gets all landed rows.

    The embedded cluster answers a fetch late rather than at the arrival of messages. So if a bridge
    reports its shipments (``shipped``), the sink stops fetching once all of them are stored
    (``is_resting``), and resumes when there are more.

    ``num_stored`` counts messages that became rows, ``num_dead`` those sent to the dead letters,
    ``num_batches`` their batches; ``last_stored_s`` is the time at which the latest batch landed,
    in seconds of the UTC epoch, 0 before the first.
    """

    def __init__(
        self,
        config: KafkaConfig,
        telemetry: TelemetryConfig,
        store: Store,
        ledger: OutboxLedger,
        clock: Clock,
        on_stored: Callable[[Iterable[int]], None] | None = None,
        on_sampled: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._on_stored = on_stored
        self._on_sampled = on_sampled
        self.insertion = Insertion(store, clock)
        self._progress = SinkProgress()
        self._stopping = False
        self._restart = asyncio.Event()
        self._wake = asyncio.Event()
        self._shipped: Offsets | None = None
        self.is_resting = False
        self.traces: StoredTraces | None = None
        self.num_stored = 0
        self.num_dead = 0
        self.num_batches = 0
        self.last_stored_s = 0.0
        # On the monotonic clock: a batch that is not full waits until then.
        self._next_sparse_s = 0.0

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stopping = True
        self._wake.set()
        self.insertion.stop()

    def lag(self) -> dict[str, int]:
        """Return the number of messages in Kafka that are not in ClickHouse yet, by topic, of the
        whole group.

        It is refreshed every second, stays unchanged while Kafka is unreachable, and lacks unknown
        topics.
        """
        return self._progress.lag()

    def num_behind(self, ends: Offsets) -> int:
        """Return the number of messages before these offsets that the group has not stored yet."""
        return self._progress.num_behind(ends)

    def begin_again(self) -> None:
        """Forget the positions and rejoin the group, since Kafka was replaced."""
        self._shipped = None
        self._restart.set()
        self._wake.set()

    def shipped(self, ends: Offsets) -> None:
        """Note the new ends of partitions to which this process's bridge has sent messages."""
        self._shipped = {**(self._shipped or {}), **ends}
        self._progress.note_ends(ends)
        self._wake.set()

    async def run(self) -> None:
        """Consume until ``stop``; raise Kafka's errors. Wait while the store is unreachable."""
        manages_groups = await ensure_topics(self._config)
        while not self._stopping:
            if self._restart.is_set():
                self._restart.clear()
                self._progress.clear()
            await self._consume(manages_groups)

    async def _consume(self, manages_groups: bool) -> None:
        rebalance = RebalanceListener(self._clock)
        consumer = await start_consumer(
            self._config, manages_groups=manages_groups, listener=rebalance
        )
        producer = make_producer(self._config)
        watching = Tasks()
        try:
            await producer.start()
            try:
                # Keep following while a batch waits for the store.
                follow_ends = partial(self._follow_ends, consumer)
                watching.repeat(follow_ends, _REFRESH_INTERVAL_S, self._clock, "sink-progress")
                await self._move(
                    consumer, rebalance, RecordDeadLetters(producer), may_rest=not manages_groups
                )
            finally:
                await watching.close()
                await stop_client(producer)
        finally:
            await stop_client(consumer)

    async def _move(
        self,
        consumer: AIOKafkaConsumer,
        rebalance: RebalanceListener,
        dead_letters: RecordDeadLetters,
        *,
        may_rest: bool,
    ) -> None:
        while not self._stopping and not self._restart.is_set():
            self._wake.clear()
            if rebalance.is_pending:
                await rebalance.wait(_POLL_MOST_S)
                continue
            with rebalance.batch():
                batch = await self._gather(consumer, rebalance, may_rest=may_rest)
                if batch.num_messages:
                    started_s = self._clock.monotonic()
                    await self._store_batch(batch, dead_letters)
                    await _commit(consumer, batch)
                    self._progress.note_stored(batch.next_offsets)
                    stored_s = self._clock.monotonic()
                    self._next_sparse_s = stored_s + sparse_rest_s(
                        stored_s - started_s, self._telemetry.batch_interval_s
                    )
            await self._progress.note_positions(consumer)
            if may_rest and not batch.num_messages:
                await self._rest(consumer)

    async def _rest(self, consumer: AIOKafkaConsumer) -> None:
        """Stop fetching until there is more, provided that all shipped messages are stored."""
        if self._shipped is None or self.num_behind(self._shipped) or any(self.lag().values()):
            return
        self.is_resting = True
        try:
            await self._pause(consumer, _SHORT_REST_S)
            if not self._wake.is_set():
                # The client checks five times a second whether paused partitions resume.
                partitions = list(consumer.assignment())
                consumer.unsubscribe()
                await wait_or_sleep(self._wake, self._clock, _LONGEST_REST_S - _SHORT_REST_S)
                consumer.assign(partitions)
        finally:
            self.is_resting = False

    async def _follow_ends(self, consumer: AIOKafkaConsumer) -> None:
        if not self.is_resting:
            await self._progress.refresh(consumer)

    async def _gather(
        self, consumer: AIOKafkaConsumer, rebalance: RebalanceListener, *, may_rest: bool
    ) -> MessageBatch:
        """Return the messages within ``batch_interval_s`` of the first message and until sparse
        batches have rested, or a full batch; fewer if partitions are about to change owners."""
        batch = MessageBatch()
        most = self._most_messages()
        interval_s = self._telemetry.batch_interval_s
        deadline_s = self._clock.monotonic() + interval_s
        while batch.num_messages < most and not self._stopping and not rebalance.is_pending:
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0 or self._restart.is_set():
                break
            self._wake.clear()
            if may_rest and self._has_all_shipped(batch):
                await self._pause(consumer, left_s)
                continue
            polled = await consumer.getmany(
                timeout_ms=int(min(left_s, _POLL_MOST_S) * 1000) + 1,
                max_records=min(_POLL_MESSAGES, most - batch.num_messages),
            )
            if polled and not batch.num_messages:
                deadline_s = max(self._clock.monotonic() + interval_s, self._next_sparse_s)
            for partition, messages in polled.items():
                for message in messages:
                    batch.add(partition, message)
            # Buffered messages come without waiting: give other tasks a turn, too.
            await asyncio.sleep(0)
        return batch

    def _has_all_shipped(self, batch: MessageBatch) -> bool:
        """Return whether Kafka holds no further messages, as far as this process's bridge knows."""
        if self._shipped is None or not batch.num_messages:
            return False
        return self.num_behind(self._shipped) <= batch.num_messages

    async def _pause(self, consumer: AIOKafkaConsumer, most_s: float) -> None:
        """Stop fetching until there is more, for at most ``most_s``."""
        partitions = consumer.assignment()
        consumer.pause(*partitions)
        try:
            await wait_or_sleep(self._wake, self._clock, most_s)
        finally:
            consumer.resume(*partitions)

    def _most_messages(self) -> int:
        """Return ``batch_rows``, or up to four times as many while that many wait, since each batch
        has a fixed cost."""
        most = self._telemetry.batch_rows
        return min(max(most, sum(self.lag().values())), _CATCH_UP_FACTOR * most)

    async def _store_batch(self, batch: MessageBatch, dead_letters: RecordDeadLetters) -> None:
        letters = list(batch.poison)
        for table, rows in batch.tables():
            since_ns = self._clock.now_ns()
            refused = await self.insertion.insert(table, rows)
            if self.traces is not None:
                self.traces.stored(table.name, rows, since_ns)
            letters += [
                DeadLetterRecord.of(row.message, reason, row.sequence) for row, reason in refused
            ]
            records = [row.record for row in rows if isinstance(row.record, RequestRecord)]
            if table is GENERATION_ROWS:
                await self._merge({record.parent_id for record in records})
            elif self._on_stored is not None:
                self._on_stored(record.done_ns for record in records)
            if self._on_sampled is not None and table is WORKER_SAMPLES:
                self._on_sampled()
        if letters:
            await dead_letters.send(letters)
        sequences = batch.sequences()
        if sequences:
            await self.insertion.until_stored(lambda: self._ledger.add(sequences))
        self.num_stored += batch.num_messages - len(letters)
        self.num_dead += len(letters)
        self.num_batches += 1
        self.last_stored_s = self._clock.now_ns() / 1e9

    async def _merge(self, request_ids: set[str]) -> None:
        """Recompute the rows of requests of which generations were stored."""

        async def merge() -> None:
            done_ns = await merge_generations(self._store, request_ids)
            if self._on_stored is not None:
                self._on_stored(done_ns)

        await self.insertion.until_stored(merge)


def sparse_rest_s(took_s: float, batch_interval_s: float) -> float:
    """Return the pause after a batch that took ``took_s`` to store; a full batch does not wait."""
    longest_s = max(0.0, _SPARSE_INTERVALS * batch_interval_s - 2 * took_s)
    return min(took_s * (1 / _SPARSE_SHARE - 1), longest_s)


async def _commit(consumer: AIOKafkaConsumer, batch: MessageBatch) -> None:
    mine = consumer.assignment()
    offsets = {tp: offset for tp, offset in batch.next_offsets.items() if tp in mine}
    if len(offsets) < len(batch.next_offsets):
        logger.info("some partitions have another owner, who reads the last batch again")
    if not offsets:
        return
    try:
        await consumer.commit(offsets)
    except (CommitFailedError, IllegalStateError) as error:
        # The group was rebalanced meanwhile: the new owner reads these messages again, and the rows
        # merge.
        logger.info("offsets were not taken after a rebalance", extra={"reason": str(error)})
