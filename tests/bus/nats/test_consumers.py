"""Consumers of tenant queues: the server creates and removes them without losing a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client

from millrace.bus import subjects
from millrace.bus.api import Bus
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats import connect, jetstream, topology
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job
from tests.support.nats.streams import delete_streams
from tests.support.servers import NatsServer
from tests.support.waiting import eventually

JOB = Job(request_id="r1", model="demo", prompt="hi")
TENANT_QUEUE = TenantQueue.of(JOB)
SECOND = 1_000_000_000
ACK_WAIT_S = 1.0


class Api:
    """JetStream as an operator sees it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, request: str, body: object = None) -> dict[str, object]:
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self.client.request(f"$JS.API.{request}", payload)
        decoded: dict[str, object] = msgspec.json.decode(answer.data)
        return decoded

    async def consumers(self) -> list[str]:
        names = (await self.call("CONSUMER.NAMES.JOBS"))["consumers"]
        assert isinstance(names, list)
        return names


@pytest.fixture
async def api(nats_server: NatsServer) -> AsyncIterator[Api]:
    await delete_streams(nats_server)
    client = await nats.connect(nats_server.url)
    yield Api(client)
    await client.close()


@pytest.fixture
async def bus(api: Api, nats_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connect(
        NatsConfig(url=nats_server.url, ack_wait_s=ACK_WAIT_S), "test", part=Part.SCHEDULER
    )
    yield bus
    await bus.close()


async def test_a_store_with_a_consumer_for_each_model_is_taken_over(
    api: Api, nats_server: NatsServer
) -> None:
    stream = {
        "name": "JOBS",
        "subjects": ["jobs.*.*"],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "max_msgs": 100,
        "num_replicas": 1,
        "duplicate_window": 600 * SECOND,
        "allow_direct": True,
    }
    assert "error" not in await api.call("STREAM.CREATE.JOBS", stream)
    consumer = {"durable_name": "model-demo", "filter_subject": "jobs.demo.*"}
    consumer |= {"ack_policy": "explicit", "deliver_policy": "all"}
    body = {"stream_name": "JOBS", "config": consumer}
    assert "error" not in await api.call("CONSUMER.DURABLE.CREATE.JOBS.model-demo", body)
    for request_id in ("held", "waiting"):
        payload = msgspec.msgpack.encode(msgspec.structs.replace(JOB, request_id=request_id))
        await api.client.jetstream().publish("jobs.demo.free", payload)
    held = await api.client.subscribe("held")
    await api.client.publish("$JS.API.CONSUMER.MSG.NEXT.JOBS.model-demo", b"1", "held")
    assert (await held.next_msg(5.0)).reply

    bus = await connect(NatsConfig(url=nats_server.url), "new", part=Part.SCHEDULER)
    tenant_queue = TenantQueue("demo", JOB.tier, None)
    assert await bus.jobs.tenant_queues() == {tenant_queue: 2}
    pulled = await bus.jobs.pull(tenant_queue, 2, 1.0)
    assert [leased.job.request_id for leased in pulled] == ["held", "waiting"]
    assert all(leased.uncertain for leased in pulled)
    await bus.jobs.publish(JOB)
    assert len(await bus.jobs.pull(TENANT_QUEUE, 1, 1.0)) == 1
    expected = {subjects.jobs_consumer(tenant_queue), subjects.jobs_consumer(TENANT_QUEUE)}
    assert set(await api.consumers()) == expected
    await bus.close()


async def test_jobs_that_leave_while_they_are_counted_hide_no_others(
    api: Api, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(NatsConfig(url=nats_server.url), "counting", part=Part.SCHEDULER)
    anybody = TenantQueue("demo", JOB.tier, None)
    payload = msgspec.msgpack.encode(JOB)
    for _ in range(2):
        await api.client.jetstream().publish(subjects.job(anybody), payload)
    reserved = TENANT_QUEUE._replace(reserved=True)
    await api.client.jetstream().publish(subjects.job(reserved), payload)
    count = jetstream.subjects_in

    async def count_and_drop(*arguments: Any) -> dict[str, int]:
        found = await count(*arguments)
        await api.call("STREAM.PURGE.JOBS", {"filter": subjects.job(anybody)})
        return found

    monkeypatch.setattr(jetstream, "subjects_in", count_and_drop)
    assert await bus.jobs.tenant_queues() == {anybody: 2, reserved: 1}
    await bus.close()


async def test_the_server_removes_unused_consumers(
    api: Api, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "QUEUE_IDLE_S", 0.1)
    await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    assert await api.consumers() == [subjects.jobs_consumer(TENANT_QUEUE)]

    async def gone() -> bool:
        return not await api.consumers()

    await eventually(gone)
    await bus.jobs.publish(JOB)
    assert len(await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)) == 1


async def test_a_lost_delivery_count_is_reported(api: Api, bus: Bus) -> None:
    await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    await bus.jobs.publish(JOB)
    (held,) = await bus.jobs.pull(TENANT_QUEUE, 1, 1.0)
    assert not held.uncertain
    await api.call(f"CONSUMER.DELETE.JOBS.{subjects.jobs_consumer(TENANT_QUEUE)}")
    (again,) = await bus.jobs.pull(TENANT_QUEUE, 1, 1.0)
    assert (again.stream_sequence, again.num_deliveries) == (held.stream_sequence, 1)
    assert again.uncertain
    await bus.jobs.ack(held.lease)
    assert not await bus.jobs.is_open(held.stream_sequence)


async def test_a_killed_server_may_have_lost_its_last_counts(
    bus: Bus, nats_server: NatsServer
) -> None:
    await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    await bus.jobs.publish(JOB)
    (held,) = await bus.jobs.pull(TENANT_QUEUE, 1, 1.0)
    assert not held.uncertain
    nats_server.kill()
    nats_server.start()
    (again,) = await bus.jobs.pull(TENANT_QUEUE, 1, 5.0)
    assert again.uncertain
    await bus.jobs.ack(again.lease)
    await bus.jobs.publish(msgspec.structs.replace(JOB, request_id="later"))
    (later,) = await bus.jobs.pull(TENANT_QUEUE, 1, 5.0)
    assert (later.job.request_id, later.uncertain) == ("later", False)


async def test_looking_at_a_line_keeps_nothing_on_the_server(api: Api, bus: Bus) -> None:
    await bus.jobs.publish(JOB)
    await bus.jobs.depth(TENANT_QUEUE)
    await bus.jobs.tenant_queues()
    assert not await bus.jobs.forget_tenant_queue(TENANT_QUEUE)
    assert await api.consumers() == []
    assert (await bus.jobs.depth(TENANT_QUEUE)).num_queued == 1


async def test_the_jobs_stream_permits_more_consumers_than_the_servers_default(
    api: Api, bus: Bus
) -> None:
    info = await api.call("STREAM.INFO.JOBS")
    config = info["config"]
    assert isinstance(config, dict)
    assert config["max_consumers"] == topology.MAX_JOBS_CONSUMERS
