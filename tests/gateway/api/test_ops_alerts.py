"""``/ops/api/alerts``: alerts of the gateway and of telemetry, and unknown alerts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.store.watch import StoreWatch
from millrace.gateway.alerts import GatewayAlerts
from millrace.gateway.streams.fleet_view import FleetView
from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import AlertState
from millrace.schemas.config import GatewayConfig, StorageConfig
from millrace.schemas.control import QueueStatus, TelemetryAnswer, TelemetryQuery
from tests.support.manual_clock import ManualClock
from tests.support.running_gateway import RunningGateway, running_gateway


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway(GatewayConfig(telemetry_timeout_s=1.0)) as made:
        yield made


@pytest.fixture
async def http(front: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as made:
        yield made


async def alerts_of(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await http.get("/ops/api/alerts")
    assert answer.status_code == 200, answer.text
    alerts: list[dict[str, Any]] = answer.json()
    return alerts


async def test_what_fires_comes_first_and_objectives_are_the_configuration_s(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    asked: list[TelemetryQuery] = []
    alert = {
        "name": "MillraceGenerationsFail",
        "subject": "demo",
        "state": "firing",
        "severity": "page",
        "value": 0.25,
        "bound": 0.02,
        "unit": "share",
        "for_s": 120.0,
        "since_s": 1_700_000_000.0,
        "meaning": "Generations of a model fail",
        "advice": "Look.",
    }

    async def answer(query: TelemetryQuery) -> TelemetryAnswer:
        asked.append(query)
        return TelemetryAnswer(rows_json=json.dumps([alert]).encode())

    subscription = await front.worker.bus.control.serve_telemetry(answer)
    alerts = await alerts_of(http)
    await http.get("/ops/api/slo_budget", params={"target": "0.5"})
    await subscription.close()
    assert alerts[0] == alert | {"detail": ""}
    assert {one["name"] for one in alerts} >= {"MillraceStoreFull", "MillraceTelemetryAbsent"}
    assert [query.params for query in asked] == [
        {"ttft_ms": "1000.0", "target": "0.95"},
        {"ttft_ms": "1000.0", "tpot_ms": "100.0", "target": "0.5", "window_s": "2592000"},
    ]
    assert (await http.get("/ops/api/alerts.csv")).status_code != 200


async def test_without_telemetry_its_alerts_are_unknown(http: httpx.AsyncClient) -> None:
    by_name = {one["name"]: one for one in await alerts_of(http)}
    assert by_name.keys() >= RULES.keys() - {"MillraceNoWorkers", "MillraceQueueOld"}
    assert by_name["MillraceTelemetryAbsent"]["state"] == "pending"
    assert by_name["MillraceGenerationsFail"]["state"] == "unknown"
    assert "does not answer" in by_name["MillraceGenerationsFail"]["detail"]
    assert by_name["MillraceStoreFull"]["state"] == "ok"


async def test_queues_workers_and_disks() -> None:
    clock = ManualClock()
    fleet = FleetView(clock)
    free = {"nats": 5_000_000_000}
    stores = StoreWatch(
        StorageConfig(nats_dir="nats"),
        clock,
        MemoryBus(MemoryBroker()).storage,
        read_free_bytes=lambda folder: free[folder],
    )
    alerts = GatewayAlerts(fleet, stores, clock)

    async def look(queue: QueueStatus | None = None) -> dict[tuple[str, str], AlertState]:
        if queue is not None:
            fleet.on_queue(queue)
        await stores.look()
        await alerts.look()
        return {(one.name, one.subject): one.state for one in alerts.alerts()}

    well = QueueStatus(model="m", num_queued=3, bound=10, num_workers=1, oldest_wait_s=4_000)
    assert set((await look(well)).values()) == {AlertState.OK}
    bad = QueueStatus(model="m", num_queued=9, bound=10, interactive_wait_s=31)
    free["nats"] = 900_000_000
    await look(bad)
    await clock.advance(60.0)
    found = await look(bad)
    assert found["MillraceQueueOld", "m"] is AlertState.FIRING
    assert found["MillraceQueueNearlyFull", "m"] is AlertState.PENDING
    assert found["MillraceNoWorkers", "m"] is AlertState.PENDING
    assert found["MillraceStoreShort", "nats"] is AlertState.PENDING
    assert found["SchedulerSilent", ""] is AlertState.OK
    free["nats"] = 1
    assert (await look(bad))["MillraceStoreFull", "nats"] is AlertState.PENDING
    await clock.advance(60.0)
    await look()
    assert [one.name for one in alerts.alerts() if one.state is AlertState.PENDING] == [
        "SchedulerSilent",
        "MillraceStoreShort",
    ]
    assert {one.subject for one in alerts.alerts() if one.state is AlertState.FIRING} == {"nats"}
