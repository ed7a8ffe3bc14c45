"""Kill between insert and count: the next start counts the uncounted rows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import KafkaConfig, NatsConfig, TelemetryConfig
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from tests.support.servers import NatsServer
from tests.support.waiting import eventually
from tests.telemetry.process import TelemetryProcess
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

NUM_RECORDS = 120


async def test_killed_between_insert_and_count(nats_server: NatsServer, tmp_path: Path) -> None:
    kafka = EmbeddedKafka()
    process = TelemetryProcess(
        tmp_path, nats_server.url, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    )
    never = TelemetryConfig(batch_interval_s=0.1, rollup_interval_s=3_600.0)
    prompt = msgspec.structs.replace(never, rollup_interval_s=0.1)
    process.config = msgspec.structs.replace(process.config, telemetry=never)
    process.start()
    await process.answers()
    bus = await connect(NatsConfig(url=nats_server.url), "test", part=Part.SCHEDULER)
    records = [request_record(number) for number in range(NUM_RECORDS)]
    for record in records:
        await bus.outbox.publish(record)
    await bus.close()
    await _answers(process, "SELECT count() FROM requests", str(NUM_RECORDS))
    assert await process.sql("SELECT sum(requests) FROM usage_by_minute") == "0"
    process.kill()

    process.config = msgspec.structs.replace(process.config, telemetry=prompt)
    process.start()
    await process.answers()
    tokens = sum(record.prompt_tokens for record in records)
    await _answers(
        process,
        "SELECT sum(requests), sum(prompt_tokens), "
        "sum(cost) = (SELECT sum(cost) FROM requests FINAL) FROM usage_by_minute",
        f"{NUM_RECORDS}\t{tokens}\t1",
    )
    assert process.stop() == 0
    kafka.close()


async def _answers(process: TelemetryProcess, sql: str, expected: str) -> None:
    async def holds() -> bool:
        return await process.sql(sql) == expected

    await eventually(holds, timeout_s=30, what=sql, poll_s=POLL_S)
