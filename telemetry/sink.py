"""From Kafka into ClickHouse: in batches, offsets committed only after the rows are in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from bus.clock import Clock
from schemas.config import KafkaConfig, TelemetryConfig
from telemetry.batches import Batch, Row, content_token
from telemetry.dead_letters import DeadLetters
from telemetry.kafka import Offsets, ensure_topics, make_producer, start_consumer, stop_client
from telemetry.ledger import Ledger
from telemetry.store import RejectedRowsError, Store, StoreUnavailableError
from telemetry.tables import Table

logger = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.2
_RETRY_MOST_S = 5.0
_POSITION_TIMEOUT_S = 0.5


class Sink:
    """A member of the consumer group.

    A batch is stored table by table, then entered in the ledger, then committed. It may be stored
    again after any failure in between: rows merge by identity, the ledger's ranges by overlap.
    """

    def __init__(
        self,
        config: KafkaConfig,
        telemetry: TelemetryConfig,
        store: Store,
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._stopping = False
        self._restart = asyncio.Event()
        self._stored: dict[TopicPartition, int] = {}
        self.num_stored = 0

    def stop(self) -> None:
        """End after the batch in hand."""
        self._stopping = True

    def num_behind(self, ends: Offsets) -> int:
        """How many messages before these offsets this sink has still to store."""
        behind = (end - self._stored.get(partition, 0) for partition, end in ends.items())
        return sum(count for count in behind if count > 0)

    def begin_again(self) -> None:
        """Forget the positions and join the group anew: Kafka is another one than before."""
        self._restart.set()

    async def run(self) -> None:
        """Consume until ``stop``; raises what Kafka raises. Waits while the store is away."""
        manages_groups = await ensure_topics(self._config)
        while not self._stopping:
            self._restart.clear()
            self._stored.clear()
            await self._consume(manages_groups)

    async def _consume(self, manages_groups: bool) -> None:
        consumer = await start_consumer(self._config, manages_groups=manages_groups)
        producer = make_producer(self._config)
        try:
            await producer.start()
            try:
                dead_letters = DeadLetters(producer)
                while not self._stopping and not self._restart.is_set():
                    batch = await self._gather(consumer)
                    if batch.num_messages:
                        await self._store_batch(batch, dead_letters)
                        await _commit(consumer, batch)
                    await self._note_positions(consumer, batch)
            finally:
                await stop_client(producer)
        finally:
            await stop_client(consumer)

    async def _gather(self, consumer: AIOKafkaConsumer) -> Batch:
        """Up to ``batch_rows`` messages, or what came within ``batch_interval_s`` of the first."""
        batch = Batch()
        interval_s = self._telemetry.batch_interval_s
        deadline_s = self._clock.monotonic() + interval_s
        while batch.num_messages < self._telemetry.batch_rows and not self._stopping:
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0:
                break
            polled = await consumer.getmany(
                timeout_ms=int(left_s * 1000) + 1,
                max_records=self._telemetry.batch_rows - batch.num_messages,
            )
            if polled and not batch.num_messages:
                deadline_s = self._clock.monotonic() + interval_s
            for partition, messages in polled.items():
                for message in messages:
                    batch.add(partition, message)
        return batch

    async def _store_batch(self, batch: Batch, dead_letters: DeadLetters) -> None:
        for table, rows in batch.tables():
            for row, reason in await self._insert(table, rows):
                await self._bury(row, reason, dead_letters)
        for item in batch.poison:
            await dead_letters.send(
                item.message.value,
                reason=item.reason,
                sequence=item.sequence,
                key=item.message.key,
                origin=(item.message.topic, item.message.partition, item.message.offset),
            )
        sequences = batch.sequences()
        if sequences:
            await self._until_stored(lambda: self._ledger.add(sequences))
        self.num_stored += batch.num_messages - len(batch.poison)

    async def _insert(self, table: Table[Any], rows: list[Row]) -> list[tuple[Row, str]]:
        """Insert; the rows that ClickHouse can never take, each with the reason."""
        columns = table.to_columns([row.record for row in rows], [row.sequence for row in rows])
        token = content_token(rows)
        try:
            await self._until_stored(lambda: self._store.insert(table, columns, token))
        except RejectedRowsError as error:
            if len(rows) == 1:
                return [(rows[0], error.message)]
            middle = len(rows) // 2
            return [
                *await self._insert(table, rows[:middle]),
                *await self._insert(table, rows[middle:]),
            ]
        return []

    async def _bury(self, row: Row, reason: str, dead_letters: DeadLetters) -> None:
        message = row.message
        await dead_letters.send(
            message.value,
            reason=reason,
            sequence=row.sequence,
            key=message.key,
            origin=(message.topic, message.partition, message.offset),
        )

    async def _until_stored(self, write: Callable[[], Awaitable[None]]) -> None:
        """Try until ClickHouse takes it; meanwhile Kafka keeps what comes."""
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                await write()
            except StoreUnavailableError as error:
                if self._stopping:
                    raise
                logger.warning(
                    "ClickHouse is away; trying again",
                    extra={"delay_s": delay_s, "reason": error.message},
                )
                await self._clock.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MOST_S)
            else:
                return

    async def _note_positions(self, consumer: AIOKafkaConsumer, batch: Batch) -> None:
        """All before a partition's position has been stored, by this life or one before it."""
        self._stored.update(batch.next_offsets)
        for partition in consumer.assignment():
            try:
                async with asyncio.timeout(_POSITION_TIMEOUT_S):
                    self._stored[partition] = await consumer.position(partition)
            except (TimeoutError, IllegalStateError):
                logger.debug("a partition is changing hands", extra={"partition": str(partition)})


async def _commit(consumer: AIOKafkaConsumer, batch: Batch) -> None:
    try:
        await consumer.commit(dict(batch.next_offsets))
    except (CommitFailedError, IllegalStateError) as error:
        # The group was rebalanced meanwhile: the new owner reads these again, and they merge.
        logger.info("offsets were not taken after a rebalance", extra={"reason": str(error)})
