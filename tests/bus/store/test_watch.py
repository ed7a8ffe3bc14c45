"""Storage watch, with fake disks and a fake bus."""

from __future__ import annotations

import pytest
from prometheus_client.core import CollectorRegistry

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.storage import CLICKHOUSE, KAFKA, NATS
from millrace.bus.store.watch import StoreMetrics, StoreWatch
from millrace.runtime.metrics_server import render
from millrace.schemas.config import StorageConfig
from millrace.schemas.errors import StoreFullError
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

_MIB = 1024 * 1024
_CONFIG = StorageConfig(nats_dir="nats", clickhouse_dir="rows", min_free_bytes=100 * _MIB)


class Disks:
    """Free space of each folder in MiB, or None for a folder that cannot be read."""

    def __init__(self, **free_mib: int | None) -> None:
        self.free_mib = free_mib

    def read(self, folder: str) -> int:
        free = self.free_mib[folder]
        if free is None:
            raise OSError("no such device")
        return free * _MIB


async def test_a_disk_is_short_below_the_mark_and_well_a_little_above_it() -> None:
    disks = Disks(nats=100, rows=100)
    watch = StoreWatch(_CONFIG, ManualClock(), read_free_bytes=disks.read)
    await watch.look()
    assert watch.troubles() == {}
    watch.check()
    for free_mib in (99, 101, 124):
        disks.free_mib["nats"] = free_mib
        await watch.look()
        with pytest.raises(StoreFullError, match=f"the store nats has {free_mib} MiB of room") as e:
            watch.check()
        assert (e.value.http_status, e.value.retryable, e.value.retry_after_s) == (503, True, 5.0)
    disks.free_mib["nats"] = 125
    await watch.look()
    watch.check()


async def test_a_short_telemetry_disk_does_not_close_the_queue() -> None:
    disks = Disks(nats=500, rows=1)
    watch = StoreWatch(_CONFIG, ManualClock(), read_free_bytes=disks.read)
    await watch.look()
    watch.check()
    assert list(watch.troubles()) == [CLICKHOUSE]


async def test_an_unreadable_disk_keeps_its_last_state() -> None:
    disks = Disks(nats=1, rows=None)
    watch = StoreWatch(_CONFIG, ManualClock(), read_free_bytes=disks.read)
    await watch.look()
    disks.free_mib["nats"] = None
    await watch.look()
    assert list(watch.troubles()) == [NATS]


async def test_streams_that_were_given_up_are_named_while_the_bus_is_away_too() -> None:
    broker = MemoryBroker()
    watch = StoreWatch(StorageConfig(), ManualClock(), MemoryBus(broker).storage)
    broker.failed_streams["OUTBOX"] = "no space left on device"
    await watch.look()
    with pytest.raises(StoreFullError, match="has given its streams OUTBOX up"):
        watch.check()
    broker.stop()
    await watch.look()
    assert NATS in watch.troubles()
    broker.start()
    await watch.look()
    watch.check()


class CountingStorage:
    """A store of the bus that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.failed: dict[str, str] = {}

    async def failed_streams(self) -> dict[str, str]:
        self.num_asked += 1
        return self.failed

    async def admit_jobs(self, *, admit: bool) -> None:
        raise AssertionError("nothing is closed here")


async def test_the_bus_is_asked_seldom_while_its_disk_has_room() -> None:
    clock, disks, storage = ManualClock(), Disks(nats=500, rows=500), CountingStorage()
    watch = StoreWatch(_CONFIG, clock, storage, read_free_bytes=disks.read)
    watch.start()
    await eventually(lambda: storage.num_asked == 1)

    async def asked_in(seconds: int) -> int:
        before = storage.num_asked
        for _ in range(seconds):
            await eventually(lambda: clock.num_sleepers == 1)
            await clock.advance(1.0)
        await eventually(lambda: clock.num_sleepers == 1)
        return storage.num_asked - before

    assert await asked_in(60) == 12
    disks.free_mib["nats"] = 99
    assert await asked_in(10) >= 9, "while there is no room"
    disks.free_mib["nats"] = 500
    storage.failed = {"JOBS": "no space left on device"}
    assert await asked_in(6) >= 1
    assert await asked_in(10) == 10, "while something is given up"
    await watch.close()


@pytest.mark.parametrize(
    ("free_mib", "rest_s"),
    [(50, 1.0), (101, 1.0), (8_000, 1.0), (8_400, 2.0), (20_000, 4.0), (10**6, 5.0)],
)
async def test_the_interval_between_looks_is_shorter_than_the_disk_takes_to_fill(
    free_mib: int, rest_s: float
) -> None:
    watch = StoreWatch(
        _CONFIG, ManualClock(), read_free_bytes=Disks(nats=free_mib, rows=10**7).read
    )
    assert watch.rest_s() == 1.0, "nothing is known yet"
    await watch.look()
    assert watch.rest_s() == rest_s


async def test_a_store_in_trouble_is_not_left_alone() -> None:
    storage = CountingStorage()
    disks = Disks(nats=10**6, rows=10**6)
    watch = StoreWatch(_CONFIG, ManualClock(), storage, read_free_bytes=disks.read)
    storage.failed = {"JOBS": "input/output error"}
    await watch.look()
    assert watch.rest_s() == 1.0


async def test_the_queue_is_closed_to_all_while_hardly_any_room_is_left() -> None:
    broker, clock, disks = MemoryBroker(), ManualClock(), Disks(nats=60, rows=500)
    storage = MemoryBus(broker).storage
    watch = StoreWatch(_CONFIG, clock, storage, gates=True, read_free_bytes=disks.read)

    def admits() -> bool:
        return broker.admits_jobs

    await watch.look()
    assert admits(), "the rest is for what was accepted, and its tools' next turns"
    disks.free_mib["nats"] = 49
    await watch.look()
    assert not admits()
    broker.admits_jobs = True  # somebody has set the streams up anew
    await watch.look()
    await clock.advance(5.0)
    await watch.look()
    assert not admits()
    disks.free_mib["nats"] = 110
    await watch.look()
    assert not admits()
    disks.free_mib["nats"] = 130
    await watch.look()
    assert admits()


async def test_a_new_gateway_opens_the_queue_that_a_killed_one_closed() -> None:
    broker, disks = MemoryBroker(), Disks(nats=110, rows=500)
    storage = MemoryBus(broker).storage
    broker.admits_jobs = False
    watch = StoreWatch(_CONFIG, ManualClock(), storage, gates=True, read_free_bytes=disks.read)
    await watch.look()
    assert broker.admits_jobs


async def test_metrics_say_which_store() -> None:
    disks = Disks(nats=1, rows=500)
    watch = StoreWatch(_CONFIG, ManualClock(), read_free_bytes=disks.read)
    registry = CollectorRegistry()
    registry.register(StoreMetrics((NATS, KAFKA), watch.troubles, lambda: watch.free))
    await watch.look()
    metrics = render(registry).decode()
    assert 'millrace_store_healthy{store="nats"} 0.0' in metrics
    assert 'millrace_store_healthy{store="kafka"} 1.0' in metrics
    assert 'millrace_store_free_bytes{store="clickhouse"} 5.24288e+08' in metrics
