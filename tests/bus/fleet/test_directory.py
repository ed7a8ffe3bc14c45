"""Worker directory, on the in-memory broker and on nats-server."""

from __future__ import annotations

import asyncio

import msgspec

from millrace.bus.api import Bus
from millrace.schemas.control import PrefixReport, WorkerStatus
from tests.bus.conftest import Broker
from tests.support.waiting import eventually


def status(worker_id: str, **fields: object) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id,
        name=worker_id,
        model="demo",
        max_num_sequences=4,
        **fields,  # type: ignore[arg-type]
    )


async def test_a_new_watcher_sees_all_workers_then_every_heartbeat(
    bus: Bus, broker: Broker
) -> None:
    await bus.workers.announce(status("w.1 é", num_running=1))
    await bus.workers.announce(status("w2"))
    await bus.workers.announce(status("w.1 é", num_running=2))

    async def known() -> bool:
        seen: list[WorkerStatus] = []
        subscription = await bus.workers.watch(seen.append)
        await subscription.close()
        return len(seen) == 2

    await eventually(known)
    seen: list[WorkerStatus] = []
    watcher = await broker.connect("scheduler")
    await watcher.workers.watch(seen.append)
    assert sorted(seen, key=lambda one: one.worker_id) == [
        status("w.1 é", num_running=2),
        status("w2"),
    ]
    await bus.workers.announce(status("w2", num_running=3))
    await eventually(lambda: len(seen) == 3)
    assert seen[2] == status("w2", num_running=3)


async def test_a_retired_worker_is_forgotten_at_once(bus: Bus, broker: Broker) -> None:
    seen: list[WorkerStatus] = []
    await bus.workers.watch(seen.append)
    await bus.workers.announce(status("w1"))
    await bus.workers.announce(status("w1", retired=True))
    await eventually(lambda: len(seen) == 2)
    assert seen[1].retired
    later: list[WorkerStatus] = []
    watcher = await broker.connect("scheduler")
    await watcher.workers.watch(later.append)
    assert later == []


async def test_the_bucket_tells_how_long_a_worker_has_been_silent(bus: Bus) -> None:
    assert await bus.workers.silences_s() == {}
    await bus.workers.announce(status("w.1 é"))

    async def is_silent() -> bool:
        return (await bus.workers.silences_s()).get("w.1 é", 0.0) > 0.3

    await eventually(is_silent)
    await bus.workers.announce(status("w.1 é"))

    async def is_heard() -> bool:
        return (await bus.workers.silences_s())["w.1 é"] < 0.3

    await eventually(is_heard)


async def test_garbage_does_not_end_the_watch(bus: Bus, broker: Broker) -> None:
    seen: list[WorkerStatus] = []
    await bus.workers.watch(seen.append)
    await broker.publish("hb.w1", b"\xc1")
    await broker.publish("hb.w1", msgspec.msgpack.encode(status("w1")))
    await eventually(lambda: seen == [status("w1")])


async def test_prefixes_are_told_to_all_who_watch(bus: Bus, broker: Broker) -> None:
    seen: list[PrefixReport] = []
    also_seen: list[PrefixReport] = []
    await bus.workers.watch_prefixes(seen.append)
    watcher = await broker.connect("scheduler")
    subscription = await watcher.workers.watch_prefixes(also_seen.append)
    reports = [
        PrefixReport(worker_id="w.1", model="demo", number=1, whole=True, added=b"k" * 16),
        PrefixReport(worker_id="w.1", model="demo", number=2, removed=b"k" * 8),
    ]
    await broker.publish("prefix.w1", b"\xc1")
    for report in reports:
        await bus.workers.report_prefixes(report)
    await eventually(lambda: seen == also_seen == reports)
    await subscription.close()
    await bus.workers.report_prefixes(reports[0])
    await eventually(lambda: len(seen) == 3)
    assert also_seen == reports


async def test_one_scheduler_at_a_time_may_change_roles(bus: Bus, broker: Broker) -> None:
    other = await broker.connect("scheduler")
    turns = await asyncio.gather(*(one.workers.take_role_turn("demo") for one in (bus, other)))
    assert sorted(turns) == [False, True]
    assert not await bus.workers.take_role_turn("demo")
    assert await other.workers.take_role_turn("large.1 é")
    assert await bus.workers.known() == []
