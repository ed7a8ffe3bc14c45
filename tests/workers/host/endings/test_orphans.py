"""Orphans: requests of a dead gateway end at their worker, unless they need no client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from millrace.bus.memory import MemoryBus
from millrace.bus.transport import Subscription
from millrace.registry.served import ServedModel
from millrace.schemas.control import Replay
from millrace.schemas.frames import Cancelled, FinishReason
from millrace.schemas.jobs import Source
from millrace.schemas.records import Status
from millrace.workers.host.metrics import WorkerMetrics
from tests.workers.scripted import GATEWAY, Bench, bench

GRACE_S = 8.0


@pytest.fixture
async def b(demo: ServedModel) -> AsyncIterator[Bench]:
    async with bench(demo, orphan_grace_s=GRACE_S) as made:
        yield made


async def _gateway(b: Bench, *held: str) -> Subscription:
    control = MemoryBus(b.broker).control
    return await control.serve_resume_points(GATEWAY, lambda _: None, set(held).__contains__)


async def test_an_orphan_is_cancelled_and_costs_the_tokens_that_were_made(b: Bench) -> None:
    gateway = await _gateway(b, "r1")
    await b.dispatch(b.job(source=Source.HTTP))
    b.engine.emit("r1:1", [20, 21])
    await b.settle(3 * GRACE_S)
    assert b.kinds() == ["Started", "Delta"]
    await gateway.close()
    await b.settle(GRACE_S - 1.0)
    b.engine.emit("r1:1", [22])
    await b.settle(5.0)
    assert await b.ended() == Cancelled(epoch=1, num_tokens=3, reason="orphaned")
    assert b.engine.cancelled == ["r1:1"]
    (record,) = await b.records()
    assert (record.status, record.error_code) == (Status.CANCELLED, "orphaned")
    assert (record.completion_tokens, record.cost) == (3, Decimal("0.000009"))
    assert await b.num_queued() == 0
    metrics = WorkerMetrics()
    metrics.watch("w", "demo", b.worker._engine, b.worker)
    registry = CollectorRegistry()
    registry.register(metrics)
    labels = {"model": "demo", "worker": "w"}
    assert registry.get_sample_value("millrace_orphaned_requests_total", labels) == 1.0


async def test_a_client_that_comes_back_too_late_is_told_why(b: Bench) -> None:
    await b.dispatch(b.job(source=Source.WEBSOCKET))
    b.engine.emit("r1:1", [20])
    await b.settle(GRACE_S + 5.0)
    later: list[object] = []
    await b.peer.frames.subscribe("gw-2", lambda _id, frame: later.append(frame))
    await b.command(Replay(request_id="r1", from_index=0, reply="gw-2"))
    await b.settle()
    assert later[-1] == Cancelled(epoch=1, num_tokens=1, reason="orphaned")


async def test_a_request_of_a_gateway_that_lives_on_ends_as_ever(b: Bench) -> None:
    gateway = await _gateway(b, "r1")
    await b.dispatch(b.job(source=Source.HTTP))
    b.engine.emit("r1:1", [20])
    await gateway.close()
    await b.settle(GRACE_S - 3.0)
    await _gateway(b, "r1")  # or another gateway that took the request over
    await b.settle(3 * GRACE_S)
    b.engine.emit("r1:1", [21], FinishReason.STOP)
    assert type(await b.ended()).__name__ == "Done"


@pytest.mark.parametrize(
    "changes", [{"source": Source.NATS}, {"source": Source.HTTP, "store_result": True}]
)
async def test_jobs_that_await_no_client_go_on(b: Bench, changes: dict[str, Any]) -> None:
    await b.dispatch(b.job(**changes))
    b.engine.emit("r1:1", [20])
    await b.settle(5 * GRACE_S)
    assert b.kinds() == ["Started", "Delta"]
