"""Crash of the real server: no accepted message is lost, and no process needs a restart."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from millrace.bus import codec
from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.nats import connect
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Accepted, Frame
from millrace.schemas.jobs import Job, JobResult, Tier
from millrace.schemas.records import RequestRecord
from tests.support.nats.streams import delete_streams
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import eventually

ACK_WAIT_S = 1.0
TENANT_QUEUE = TenantQueue("demo", Tier.FREE, "local")


def job(number: int) -> Job:
    return Job(request_id=f"r{number}", model="demo", prompt="hi")


@pytest.fixture
async def buses(nats_server: NatsServer) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two clients of a server that the test may kill."""
    await delete_streams(nats_server)
    config = NatsConfig(url=nats_server.url, ack_wait_s=ACK_WAIT_S)
    one, two = (
        await connect(config, "one", part=Part.SCHEDULER),
        await connect(config, "two", part=Part.SCHEDULER),
    )
    yield one, two
    if not nats_server.running:
        nats_server.start()
    await one.close()
    await two.close()


def restart(server: NatsServer) -> None:
    server.kill()
    server.start()


async def test_queued_jobs_survive(buses: tuple[Bus, Bus], nats_server: NatsServer) -> None:
    one, two = buses
    await asyncio.gather(*(one.jobs.publish(job(number)) for number in range(100)))
    held = await two.jobs.pull(TENANT_QUEUE, 10, 1.0)
    restart(nats_server)
    await asyncio.gather(*(two.jobs.ack(leased.lease) for leased in held))
    pulled: list[LeasedJob] = []
    while len(pulled) < 90:
        more = await two.jobs.pull(TENANT_QUEUE, 50, 5.0)
        assert more
        pulled += more
        await asyncio.gather(*(two.jobs.ack(leased.lease) for leased in more))
    ids = {leased.job.request_id for leased in (*held, *pulled)}
    assert ids == {f"r{number}" for number in range(100)}
    assert all(leased.num_deliveries == 1 for leased in pulled)
    assert await two.jobs.pull(TENANT_QUEUE, 1, 0.1) == []
    assert (await one.jobs.publish(job(5))).duplicate


async def test_the_jobs_of_many_tenants_survive(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, two = buses
    queues: list[TenantQueue] = []
    await two.jobs.watch(queues.append)
    jobs = [
        Job(request_id=f"{tenant}-{number}", model="demo", tenant=f"t{tenant}", prompt="hi")
        for tenant in range(20)
        for number in range(3)
    ]
    tenant_queues = list(dict.fromkeys(map(TenantQueue.of, jobs)))
    await asyncio.gather(*(one.jobs.publish(job) for job in jobs))
    await eventually(lambda: len(queues) == len(jobs))
    held = await asyncio.gather(
        *(two.jobs.pull(tenant_queue, 1, 0.0) for tenant_queue in tenant_queues)
    )
    restart(nats_server)
    rest = await asyncio.gather(
        *(two.jobs.pull(tenant_queue, 5, 5.0) for tenant_queue in tenant_queues)
    )
    ours = {leased.job.request_id for pulled in held for leased in pulled}
    later = {leased.job.request_id: leased for pulled in rest for leased in pulled}
    assert ours | later.keys() == {job.request_id for job in jobs}
    # The server may have been killed before it wrote down what it had delivered.
    assert all(later[name].uncertain for name in ours & later.keys())
    await asyncio.gather(
        *(two.jobs.ack(leased.lease) for pulled in (*held, *rest) for leased in pulled)
    )
    assert await two.jobs.tenant_queues() == {}
    await one.jobs.publish(Job(request_id="later", model="demo", prompt="hi"))
    await eventually(lambda: queues[-1] == TENANT_QUEUE)


async def test_a_waiting_pull_goes_on(buses: tuple[Bus, Bus], nats_server: NatsServer) -> None:
    one, two = buses
    waiting = asyncio.ensure_future(two.jobs.pull(TENANT_QUEUE, 1, 30.0))
    outbox = asyncio.ensure_future(two.outbox.pull(1, 30.0))
    await asyncio.sleep(0.05)
    restart(nats_server)
    await one.jobs.publish(job(1))
    await one.outbox.publish(RequestRecord(request_id="r1", tenant="t"))
    (leased,) = await asyncio.wait_for(waiting, 3.0)
    assert leased.job.request_id == "r1"
    assert len(await asyncio.wait_for(outbox, 3.0)) == 1


async def test_a_job_published_during_an_outage_is_stored_once(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, two = buses
    nats_server.kill()
    record = RequestRecord(request_id="r1", tenant="t")
    result = JobResult(request_id="r1", tenant="t", model="demo", status="done")
    tasks = [
        asyncio.ensure_future(one.jobs.publish(job(1))),
        asyncio.ensure_future(one.outbox.publish(record)),
        asyncio.ensure_future(one.results.store(result)),
    ]
    await eventually(lambda: not one.connected)
    nats_server.start()
    await asyncio.gather(*tasks)
    assert len(await two.jobs.pull(TENANT_QUEUE, 5, 1.0)) == 1
    assert len(await two.outbox.pull(5, 1.0)) == 1
    assert await two.results.fetch("t", "r1") == result


async def test_asking_for_held_requests_during_an_outage_raises(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    """An outage raises an error instead of reporting that no gateway holds the request."""
    one, two = buses
    await two.control.serve_resume_points("gw", lambda _: None, {"r1"}.__contains__)
    assert await one.control.held_requests("gw", ["r1", "r2"], 0.2) == {"r1"}
    nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await one.control.held_requests("gw", ["r1"], 2.0)
    with pytest.raises(BusUnavailableError):
        await one.control.is_held("gw", "r1", 2.0)
    nats_server.start()
    await eventually(lambda: one.connected and two.connected)
    assert await one.control.held_requests("gw", ["r1", "r2"], 0.2) == {"r1"}


async def test_frames_flow_again_and_the_reader_is_told(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, two = buses
    seen: list[tuple[str, Frame]] = []
    reconnects: list[bool] = []
    two.on_reconnect(lambda: reconnects.append(two.connected))
    await two.frames.subscribe("g", lambda *pair: seen.append(pair))
    nats_server.kill()
    await eventually(lambda: not one.connected and not two.connected)
    await one.frames.publish("g", [("lost", Accepted())])
    nats_server.start()
    await eventually(lambda: reconnects == [True] and one.connected)
    await one.frames.publish("g", [("r1", Accepted())])
    await eventually(lambda: len(seen) == 1)
    assert seen == [("r1", Accepted())]


async def test_a_server_that_lost_its_store(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, two = buses
    assert await two.jobs.pull(TENANT_QUEUE, 1, 0.05) == []
    waiting = asyncio.ensure_future(two.jobs.pull(TENANT_QUEUE, 1, 30.0))
    nats_server.kill()
    nats_server.wipe()
    nats_server.start()
    await one.jobs.publish(job(1))
    (leased,) = await asyncio.wait_for(waiting, 10.0)
    await two.jobs.ack(leased.lease)


async def test_a_hung_server_is_an_error_in_time(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect(
        NatsConfig(url=nats_server.url, connect_timeout_s=0.6), "impatient", part=Part.SCHEDULER
    )
    nats_server.pause()
    try:
        with pytest.raises(BusUnavailableError):
            await bus.jobs.publish(job(1))
        assert await bus.jobs.pull(TENANT_QUEUE, 1, 0.1) == []
    finally:
        nats_server.resume()
    await bus.close()


async def test_nobody_at_the_address() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusUnavailableError, match=r"nats\.url"):
        await connect(NatsConfig(url=url, connect_timeout_s=0.3), "test")


async def test_close_while_the_server_is_away(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, _ = buses
    pulling = asyncio.ensure_future(one.jobs.pull(TENANT_QUEUE, 1, 0.5))
    nats_server.kill()
    await eventually(lambda: not one.connected)
    await one.frames.publish("g", [("r", Accepted())])
    started_s = time.monotonic()
    await one.close()
    await one.close()
    assert time.monotonic() - started_s < 3.0
    assert not one.connected
    assert await pulling == []
    with pytest.raises(BusUnavailableError):
        await one.jobs.publish(job(1))


async def test_nothing_of_a_connection_that_was_closed_goes_on(
    buses: tuple[Bus, Bus], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed in the very turn of the loop in which an attempt to reconnect fails."""
    one, _ = buses
    open_connection = asyncio.open_connection
    closing: list[asyncio.Task[None]] = []

    def close() -> None:
        if not one.connected and not closing:
            closing.append(asyncio.ensure_future(one.close()))

    async def attempt(**options: Any) -> Any:
        try:
            return await open_connection(**options)
        finally:
            asyncio.get_running_loop().call_soon(close)

    monkeypatch.setattr(asyncio, "open_connection", attempt)
    nats_server.kill()
    await eventually(lambda: bool(closing) and closing[0].done())
    nats_server.start()
    await eventually(lambda: buses[1].connected)
    await eventually(lambda: not any("_reconnect" in repr(task) for task in asyncio.all_tasks()))
    assert not one.connected


async def test_settings_that_changed_are_taken_over(nats_server: NatsServer) -> None:
    await delete_streams(nats_server)
    first = await connect(
        NatsConfig(url=nats_server.url, ack_wait_s=30.0), "first", part=Part.SCHEDULER
    )
    await first.jobs.publish(job(1))
    await first.jobs.pull(TENANT_QUEUE, 1, 1.0)
    config = NatsConfig(url=nats_server.url, ack_wait_s=0.3, max_stored_jobs=7)
    second = await connect(config, "second", part=Part.SCHEDULER)
    await second.jobs.publish(job(2))
    assert len(await second.jobs.pull(TENANT_QUEUE, 1, 1.0)) == 1
    (again,) = await second.jobs.pull(TENANT_QUEUE, 1, 2.0)
    assert again.num_deliveries == 2
    await first.close()
    await second.close()


async def test_records_that_went_together_are_stored_once(
    buses: tuple[Bus, Bus], nats_server: NatsServer
) -> None:
    one, two = buses
    numbers = itertools.count()
    restarted = asyncio.Event()

    async def publish() -> int:
        number = next(numbers)
        record = RequestRecord(request_id=f"r{number}", tenant="t")
        while True:
            try:
                await one.outbox.publish(record, 0.02)
            except BusUnavailableError:
                continue
            return number

    async def publish_on() -> list[int]:
        published = [await publish()]
        while not restarted.is_set():
            published.append(await publish())
        return published

    publishing = asyncio.gather(*(publish_on() for _ in range(8)))
    for _ in range(3):
        had = await two.outbox.last_sequence()
        await eventually(partial(_grew, two, had))
        restart(nats_server)
    restarted.set()
    published = sorted(itertools.chain.from_iterable(await publishing))
    stored: list[int] = []
    while len(stored) < len(published):
        pulled = await two.outbox.pull(999, 5.0)
        assert pulled
        for message in pulled:
            record = codec.RECORD.decode(message.payload)
            assert isinstance(record, RequestRecord)
            stored.append(int(record.request_id[1:]))
        await two.outbox.ack(pulled)
    assert await two.outbox.pull(999, 0.1) == []
    assert sorted(stored) == published == list(range(len(published)))


async def test_a_group_that_cannot_be_sent_goes_one_by_one(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Connection, "ask", fail)
    bus = await connect(nats_config, "test", part=Part.SCHEDULER)
    records = [RequestRecord(request_id=f"r{number}", tenant="t") for number in range(3)]
    await asyncio.gather(*(bus.outbox.publish(record, 0.001) for record in records))
    assert await bus.outbox.last_sequence() == 3
    await bus.close()


async def _grew(bus: Bus, had: int) -> bool:
    return await bus.outbox.last_sequence() > had
