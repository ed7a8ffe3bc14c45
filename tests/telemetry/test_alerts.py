"""Alerts of a telemetry process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.alerts.watch import Alert, AlertState
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig, Config, KafkaConfig
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.telemetry.service import RecordFlow, TelemetryService, conditions_of
from tests.support.waiting import eventually
from tests.telemetry.records import request_record
from tests.telemetry.stores import NO_REDIS

WELL = RecordFlow(
    now_s=10_000.0,
    num_waiting=0,
    num_behind=0,
    last_stored_s=0.0,
    usage_age_s=None,
    troubles={},
    free_bytes={"kafka": 5_000_000_000},
)


@pytest.mark.parametrize(
    ("flow", "holding"),
    [
        (WELL, set()),
        (WELL._replace(num_waiting=100_001), {("MillraceOutboxFills", "")}),
        (WELL._replace(num_behind=1, last_stored_s=9_881.0), set()),
        (WELL._replace(num_behind=1, last_stored_s=9_879.0), {("MillraceTelemetryStands", "")}),
        (WELL._replace(num_behind=0, last_stored_s=1.0), set()),
        (WELL._replace(num_behind=50_001), {("MillraceTelemetryBehind", "")}),
        (WELL._replace(usage_age_s=301.0), {("MillraceUsageOld", "")}),
        (
            WELL._replace(troubles={"clickhouse": "is full"}, free_bytes={"kafka": 999_999_999}),
            {("MillraceStoreFull", "clickhouse"), ("MillraceStoreShort", "kafka")},
        ),
    ],
)
def test_alert_conditions_follow_the_record_flow(
    flow: RecordFlow, holding: set[tuple[str, str]]
) -> None:
    found = list(conditions_of(flow))
    assert {(one.name, one.subject) for one in found if one.holds} == holding


async def test_a_running_process_tells_rows_and_its_own_state(
    store_path: Path, embedded_kafka: KafkaConfig
) -> None:
    """The answer comes over the bus, for a request whose record came through Kafka."""
    bus = MemoryBus(MemoryBroker())
    config = Config(
        clickhouse=ClickHouseConfig(path=str(store_path)), kafka=embedded_kafka, redis=NO_REDIS
    )
    service = await TelemetryService.open(config, SystemClock())
    alerts: dict[tuple[str, str], Alert] = {}

    async def has_alerts() -> bool:
        query = TelemetryQuery(name="alerts", params={"target": 0.9})
        answer = await bus.control.query_telemetry(query, 5.0) or TelemetryAnswer(error="none")
        if answer.error:
            return False
        decoded = msgspec.json.decode(answer.rows_json, type=list[Alert])
        alerts.update({(one.name, one.subject): one for one in decoded})
        return ("MillraceGenerationsFail", "demo") in alerts and (
            "MillraceOutboxFills",
            "",
        ) in alerts

    running = asyncio.create_task(service.run(bus))
    try:
        record = msgspec.structs.replace(
            request_record(7, done_ns=time.time_ns()), model_served="demo"
        )
        await bus.outbox.publish(record)
        await eventually(has_alerts, 30.0, "alerts are told")
    finally:
        service.stop()
        await running
        await service.close()
    assert alerts["MillraceGenerationsFail", "demo"].state is AlertState.OK
    assert alerts["MillraceStoreFull", "kafka"].state is AlertState.OK
    wrong = TelemetryQuery(name="alerts", params={"target": "x"})
    answer = await service.answers.answer(wrong)
    assert (answer.code, answer.param) == ("invalid_parameter", "target")
