"""The store of the bus: a queue that refuses new jobs, on memory and on nats-server alike, and
nats-server on a disk that is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from millrace.bus.api import Bus
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.bus.storage import NATS
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusUnavailableError, StoreFullError
from millrace.schemas.jobs import Job, Tier
from tests.bus.conftest import Broker
from tests.support.servers import NatsServer
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.waiting import eventually

TENANT_QUEUE = TenantQueue("demo", Tier.FREE, "local")


def job(number: int, prompt: str = "hi") -> Job:
    return Job(request_id=f"r{number}", model="demo", prompt=prompt)


async def fill(bus: Bus, error: type[BusUnavailableError] = StoreFullError) -> int:
    """Publish until that is refused with ``error``; the number of the job that was."""
    for number in range(1, 1_000):
        try:
            await bus.jobs.publish(job(number, prompt="x" * 1_000))
        except error:
            return number
    raise AssertionError("it never was")


async def test_new_jobs_are_refused_and_what_is_there_ends(bus: Bus, broker: Broker) -> None:
    await bus.jobs.publish(job(1))
    await bus.storage.admit_jobs(admit=False)
    with pytest.raises(StoreFullError) as refused:
        await bus.jobs.publish(job(2))
    assert (refused.value.code, refused.value.store) == ("storage_full", NATS)
    with pytest.raises(Exception, match=r"size|room"):  # from any publisher
        await broker.store("jobs.demo.free.local", b"by hand")
    [leased] = await bus.jobs.pull(TENANT_QUEUE, 8, 5.0)
    await bus.jobs.ack(leased.lease)
    assert not await bus.jobs.is_open(leased.stream_sequence)
    await bus.storage.admit_jobs(admit=True)
    await bus.jobs.publish(job(2))
    assert await bus.storage.failed_streams() == {}


async def test_a_server_that_has_all_it_may_have_says_so(tmp_path: Path) -> None:
    """JetStream's own limit, in place of a disk's: it takes messages again once there is room."""
    server = NatsServer(tmp_path, store_options="max_file_store: 256KB")
    server.start()
    try:
        bus = await connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)
        number = await fill(bus)
        for leased in await bus.jobs.pull(TENANT_QUEUE, number, 5.0):
            await bus.jobs.ack(leased.lease)
        await bus.jobs.publish(job(number))
        await bus.close()
    finally:
        server.stop()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_mib=24) as mounted:
        yield mounted


async def test_a_stream_that_was_given_up_stays_so_until_its_server_starts_again(
    disk: SmallDisk,
) -> None:
    server = NatsServer(disk.path, store_options="sync_interval: always")
    server.start()
    try:
        config = NatsConfig(url=server.url, connect_timeout_s=1.0, ack_wait_s=1.0)
        bus = await connect(config, "test", part=Part.SCHEDULER)
        await bus.jobs.publish(job(-1))
        await bus.jobs.publish(job(0))
        await bus.jobs.pull(TENANT_QUEUE, 1, 5.0)
        assert await bus.storage.failed_streams() == {}
        disk.fill()
        num_stored = await fill(bus, BusUnavailableError)  # the last page may have some room
        assert "no space left on device" in (await bus.storage.failed_streams())["JOBS"]
        # Who starts now may go on with what was accepted.
        late = await connect(
            msgspec.structs.replace(config, max_stored_jobs=100_000), "late", part=Part.SCHEDULER
        )
        [leased] = await late.jobs.pull(TENANT_QUEUE, 1, 5.0)
        await late.jobs.ack(leased.lease)
        await late.close()
        disk.make_room()
        with pytest.raises(BusUnavailableError):
            await bus.jobs.publish(job(2_000))
        assert set(await bus.storage.failed_streams()) == {"JOBS"}
        server.stop()
        server.start()
        await eventually(lambda: bus.connected)
        assert await bus.storage.failed_streams() == {}
        assert not (await bus.jobs.publish(job(2_001))).duplicate
        found: set[str] = {leased.job.request_id}

        async def all_there() -> bool:
            found.update(
                one.job.request_id for one in await bus.jobs.pull(TENANT_QUEUE, 2_000, 0.2)
            )
            return {f"r{number}" for number in range(-1, num_stored)} <= found

        await eventually(all_there)
        await bus.close()
    finally:
        server.stop()
