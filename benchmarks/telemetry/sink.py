"""``sink``: rows per second from Kafka into embedded ClickHouse.

Measures the whole sink, pinned to one core (the embedded Kafka has the others), with decoding,
ledger and offset commits. Beside it, each step alone runs on the same rows. Prints CPU time and
wall time; on a shared machine wall time is longer. The rest beside the steps is the sink's own
loop, the ledger, the commits and the engine's merges.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from benchmarks.telemetry.record_load import running_kafka
from millrace.bus import codec, subjects
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig, KafkaConfig, TelemetryConfig
from millrace.schemas.records import RequestRecord
from millrace.telemetry.kafka.kafka import SEQUENCE_HEADER, SUBJECT_HEADER, make_producer
from millrace.telemetry.sink.batches import MessageBatch, content_token
from millrace.telemetry.sink.sink import Sink
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.outbox_ledger import OutboxLedger
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS, check
from tests.support.waiting import eventually
from tests.telemetry.records import request_record

GOAL_ROWS_PER_S = 20_000
_BATCH_ROWS = 5_000
_PARTITION = TopicPartition(subjects.REQUESTS_TOPIC, 0)
# No more rows than the embedded cluster keeps.
_ROUND_ROWS = 4 * _BATCH_ROWS

Steps = dict[str, float]


def run(rounds: int = 6, smoke: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder, running_kafka("embedded", Path(folder)) as kafka:
        # The engine's threads start later, so they are on this core as well.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        asyncio.run(measure(kafka.config, 1 if smoke else rounds))


async def measure(kafka: KafkaConfig, rounds: int) -> None:
    records = [request_record(number) for number in range(_BATCH_ROWS)]
    payloads = [codec.encode(record) for record in records]
    with tempfile.TemporaryDirectory() as path:
        store = await Store.open(ClickHouseConfig(path=path))
        await migrate(store)
        steps = await steps_alone(store, payloads)
        await store.command("TRUNCATE TABLE requests")
        reading_s, wall_s, cpu_s = 0.0, 0.0, 0.0
        for number in range(rounds):
            await fill(kafka, payloads, number * _ROUND_ROWS)
            reading_s += await read_only(kafka)
            more_wall_s, more_cpu_s = await whole_sink(kafka, store)
            wall_s, cpu_s = wall_s + more_wall_s, cpu_s + more_cpu_s
        await store.close()
    num_rows = rounds * _ROUND_ROWS
    steps["read from Kafka"] = reading_s / num_rows
    for name, step_s in steps.items():
        print(f"{name:<34}{step_s * 1e6:7.2f} us a row {step_s / (cpu_s / num_rows):5.0%} of all")
    rest_s = cpu_s / num_rows - sum(steps.values())
    print(f"{'loop, ledger, commits, merges':<34}{rest_s * 1e6:7.2f} us a row")
    print(
        f"{'the whole sink':<34}{cpu_s / num_rows * 1e6:7.2f} us a row of {len(payloads[0])} bytes"
    )
    print(
        f"{num_rows / cpu_s:,.0f} rows/s of one core (goal {GOAL_ROWS_PER_S:,}); "
        f"{num_rows / wall_s:,.0f} rows/s came about, {cpu_s / wall_s:.0%} of the core was had"
    )


async def steps_alone(store: Store, payloads: list[bytes]) -> Steps:
    """Return the CPU seconds per row of each step alone, the best of several tries."""
    messages = [message(payload, number + 1) for number, payload in enumerate(payloads)]
    batch = MessageBatch()
    for one in messages:
        batch.add(_PARTITION, one)
    (_, rows), *_ = batch.tables()
    records = [row.record for row in rows if isinstance(row.record, RequestRecord)]
    sequences = [row.sequence for row in rows]
    columns = REQUESTS.to_columns(records, sequences)

    async def decode() -> None:
        for payload in payloads:
            codec.RECORD.decode(payload)

    async def checks() -> None:
        for record in records:
            check(record)

    async def tokens() -> None:
        content_token(rows)

    async def to_columns() -> None:
        REQUESTS.to_columns(records, sequences)

    async def insert() -> None:
        await store.insert(REQUESTS, columns, f"alone-{time.perf_counter_ns()}")

    return {
        "decode": await cpu_per_row(decode),
        "check": await cpu_per_row(checks),
        "columns": await cpu_per_row(to_columns),
        "deduplication token": await cpu_per_row(tokens),
        "insert": await cpu_per_row(insert),
    }


async def cpu_per_row(work: Callable[[], Awaitable[None]], tries: int = 4) -> float:
    best_s = float("inf")
    for _ in range(tries):
        started_s = time.process_time()
        await work()
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / _BATCH_ROWS


def message(payload: bytes, sequence: int) -> ConsumerRecord:
    """Return a message as the consumer delivers it."""
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
        headers=_headers(sequence),
    )


def _headers(sequence: int) -> list[tuple[str, bytes]]:
    return [(SEQUENCE_HEADER, str(sequence).encode()), (SUBJECT_HEADER, b"rec.request")]


async def fill(kafka: KafkaConfig, payloads: list[bytes], after: int) -> None:
    """Put ``_ROUND_ROWS`` messages into Kafka, spread evenly over partitions."""
    producer = make_producer(kafka)
    await producer.start()
    partitions = sorted(await producer.partitions_for(subjects.REQUESTS_TOPIC))
    for first in range(after, after + _ROUND_ROWS, _BATCH_ROWS):
        sent = [
            await producer.send(
                subjects.REQUESTS_TOPIC,
                payloads[number % _BATCH_ROWS],
                partition=partitions[number % len(partitions)],
                headers=_headers(number + 1),
            )
            for number in range(first, first + _BATCH_ROWS)
        ]
        await asyncio.gather(*sent)
    await producer.stop()


async def read_only(kafka: KafkaConfig) -> float:
    """Return the CPU time to receive the newest ``_ROUND_ROWS`` messages and drop them."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers, max_partition_fetch_bytes=4 * 1024 * 1024
    )
    await consumer.start()
    numbers = consumer.partitions_for_topic(subjects.REQUESTS_TOPIC)
    if not numbers:
        await consumer.end_offsets([_PARTITION])
        numbers = consumer.partitions_for_topic(subjects.REQUESTS_TOPIC) or set()
    partitions = [TopicPartition(subjects.REQUESTS_TOPIC, number) for number in numbers]
    consumer.assign(partitions)
    for partition, end in (await consumer.end_offsets(partitions)).items():
        consumer.seek(partition, end - _ROUND_ROWS // len(partitions))
    num_read, started_s = 0, time.process_time()
    while num_read < _ROUND_ROWS:
        polled = await consumer.getmany(timeout_ms=200, max_records=1_000)
        num_read += sum(len(messages) for messages in polled.values())
    cpu_s = time.process_time() - started_s
    await consumer.stop()
    return cpu_s


async def whole_sink(kafka: KafkaConfig, store: Store) -> tuple[float, float]:
    """Return the wall and CPU seconds until a sink has stored a round's rows."""
    telemetry = TelemetryConfig(batch_rows=_BATCH_ROWS)
    sink = Sink(kafka, telemetry, store, OutboxLedger(store), SystemClock())
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    task = asyncio.create_task(sink.run())
    await eventually(lambda: sink.num_stored >= _ROUND_ROWS, timeout_s=60.0)
    elapsed = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    sink.stop()
    await task
    return elapsed
