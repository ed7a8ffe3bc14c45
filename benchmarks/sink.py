"""``python -m benchmarks.sink``: rows per second from Kafka into ClickHouse's embedded engine.

Three figures of one run, each for a few seconds: the engine alone (the same columns inserted again
and again), the sink's own work on messages in memory (decode, check, columns, insert), and the
whole sink behind the embedded Kafka, ledger and offset commits included.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable

from aiokafka import ConsumerRecord, TopicPartition

from bus import codec, subjects
from bus.clock import SystemClock
from schemas.config import ClickHouseConfig, KafkaConfig, TelemetryConfig
from telemetry.batches import Batch
from telemetry.embedded_kafka import EmbeddedKafka
from telemetry.kafka import SEQUENCE_HEADER, make_producer
from telemetry.ledger import Ledger
from telemetry.migrate import migrate
from telemetry.sink import Sink
from telemetry.store import Store
from telemetry.tables import REQUESTS
from tests.support.waiting import eventually
from tests.telemetry.records import request_record

_BATCH_ROWS = 5_000
_PARTITION = TopicPartition(subjects.REQUESTS_TOPIC, 0)


async def rate(work: Callable[[int], Awaitable[None]], seconds: float) -> float:
    """Rows per second of ``work``, which does one batch and is told which."""
    num_rows = 0
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        await work(num_rows // _BATCH_ROWS)
        num_rows += _BATCH_ROWS
    return num_rows / (time.perf_counter() - started_s)


def message(payload: bytes, sequence: int) -> ConsumerRecord:
    """A message as the consumer hands it over."""
    return ConsumerRecord(
        topic=_PARTITION.topic,
        partition=_PARTITION.partition,
        offset=sequence,
        timestamp=0,
        timestamp_type=0,
        key=None,
        value=payload,
        checksum=None,
        serialized_key_size=-1,
        serialized_value_size=len(payload),
        headers=((SEQUENCE_HEADER, str(sequence).encode()),),
    )


async def whole_sink(store: Store, payloads: list[bytes], seconds: float) -> float:
    """Rows per second of a sink that finds a full Kafka."""
    cluster = EmbeddedKafka()
    kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
    sink = Sink(kafka, TelemetryConfig(batch_rows=_BATCH_ROWS), store, Ledger(store), SystemClock())
    producer = make_producer(kafka)
    await producer.start()
    # No more than the embedded cluster keeps.
    num_rows = min(80_000, int(20_000 * seconds) // _BATCH_ROWS * _BATCH_ROWS)
    for first in range(0, num_rows, _BATCH_ROWS):
        sent = [
            await producer.send(
                subjects.REQUESTS_TOPIC,
                payloads[number % _BATCH_ROWS],
                headers=[(SEQUENCE_HEADER, str(number + 1).encode())],
            )
            for number in range(first, first + _BATCH_ROWS)
        ]
        await asyncio.gather(*sent)
    await producer.stop()
    started_s = time.perf_counter()
    task = asyncio.create_task(sink.run())
    await eventually(lambda: sink.num_stored >= num_rows, timeout_s=60.0)
    elapsed_s = time.perf_counter() - started_s
    sink.stop()
    await task
    cluster.close()
    return num_rows / elapsed_s


async def measure(seconds: float) -> None:
    records = [request_record(number) for number in range(_BATCH_ROWS)]
    payloads = [codec.encode(record) for record in records]
    columns = REQUESTS.to_columns(records, range(_BATCH_ROWS))
    with tempfile.TemporaryDirectory() as path:
        store = await Store.open(ClickHouseConfig(path=path))
        await migrate(store)

        async def insert_only(number: int) -> None:
            await store.insert(REQUESTS, columns, f"insert-{number}")

        async def sink_work(number: int) -> None:
            batch = Batch()
            for i, payload in enumerate(payloads):
                batch.add(_PARTITION, message(payload, number * _BATCH_ROWS + i + 1))
            for table, rows in batch.tables():
                made = table.to_columns(
                    [row.record for row in rows], [row.sequence for row in rows]
                )
                await store.insert(table, made, f"sink-{number}")

        engine = await rate(insert_only, seconds)
        work = await rate(sink_work, seconds)
        await store.command("TRUNCATE TABLE requests")
        whole = await whole_sink(store, payloads, seconds)
        await store.close()
    print(f"inserts alone, {_BATCH_ROWS} rows each  {engine:>10,.0f} rows/s")
    print(f"decode, check, insert          {work:>10,.0f} rows/s  {work / engine:6.1%} of that")
    print(f"the sink behind Kafka          {whole:>10,.0f} rows/s  {whole / engine:6.1%} of that")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sink", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each of the three figures")
    asyncio.run(measure(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
