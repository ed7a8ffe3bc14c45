"""Jobs with adapters: which version they have, from the queue to whichever worker ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.schemas.control import Dispatch
from millrace.schemas.frames import Done, Failed
from millrace.schemas.models.adapters import Adapter
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job

SQL = Adapter(name="sql", version="1", source="/sql", model="m")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.open()
    yield world
    await world.close()


async def _worker(world: World, name: str = "w", max_adapters: int = 4) -> ScriptedWorker:
    worker = await world.add_worker(name)
    worker.max_adapters = max_adapters
    await worker.announce()
    return worker


async def _sent(world: World, worker: ScriptedWorker, request_id: str) -> Dispatch:
    await world.until(lambda: request_id in worker.running)
    return worker.running[request_id]


async def test_a_worker_is_told_what_to_load(world: World) -> None:
    worker = await _worker(world)
    world.adapters.offer(SQL)
    await world.client.jobs.publish(job("r", adapter="sql", adapter_version="1"))
    dispatch = await _sent(world, worker, "r")
    assert dispatch.adapter == SQL.ref
    assert dispatch.job.adapter_version == "1"


async def test_a_job_keeps_its_version_though_the_name_has_another(world: World) -> None:
    worker = await _worker(world)
    world.adapters.offer(SQL)
    newer = world.adapters.offer(msgspec.structs.replace(SQL, version="2", source="/sql2"))
    await world.client.jobs.publish(job("old", adapter="sql", adapter_version="1"))
    await world.client.jobs.publish(job("new", adapter="sql"))
    assert (await _sent(world, worker, "old")).adapter == SQL.ref
    assert (await _sent(world, worker, "new")).adapter == newer.ref


async def test_a_published_job_keeps_the_version_that_it_was_first_given(world: World) -> None:
    first = await _worker(world)
    world.adapters.offer(SQL)
    await world.client.jobs.publish(job("r", adapter="sql"))
    assert (await _sent(world, first, "r")).adapter == SQL.ref
    world.adapters.offer(msgspec.structs.replace(SQL, version="2"))
    # Worker and scheduler die together, so another scheduler prepares it again.
    await first.kill()
    await world.kill_scheduler()
    await world.add_scheduler()
    second = await _worker(world, "v")
    again = await _sent(world, second, "r")
    assert again.adapter == SQL.ref
    assert again.epoch > 0


async def test_a_worker_that_dies_gives_its_stream_to_one_with_the_same_version(
    world: World,
) -> None:
    first = await _worker(world)
    world.adapters.offer(SQL)
    await world.client.jobs.publish(job("r", adapter="sql", adapter_version="1"))
    await _sent(world, first, "r")
    await first.kill()
    second = await _worker(world, "v")
    assert (await _sent(world, second, "r")).adapter == SQL.ref


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": "nope"},
        {"adapter": "sql", "adapter_version": "9"},
        {"adapter": "sql", "adapter_version": "1", "tenant": "other"},
        {"adapter": "elsewhere"},
    ],
    ids=str,
)
async def test_what_is_not_there_is_no_model(world: World, changes: dict[str, str]) -> None:
    await _worker(world)
    world.adapters.offer(msgspec.structs.replace(SQL, tenants=("acme",)))
    world.adapters.offer(Adapter(name="elsewhere", version="1", source="/x", model="another"))
    await world.client.jobs.publish(job("r", **changes))
    await world.until(lambda: world.terminal("r") is not None)
    terminal = world.terminal("r")
    assert isinstance(terminal, Failed)
    assert terminal.code == "model_not_found"
    record = world.record("r")
    assert record is not None
    assert record.adapter == changes["adapter"]


async def test_a_store_that_is_away_is_waited_for(world: World) -> None:
    worker = await _worker(world)
    world.adapters.offer(SQL)
    world.adapters.away = True
    await world.client.jobs.publish(job("r", adapter="sql", adapter_version="1"))
    await world.pass_s(3.0)
    assert not worker.running
    assert world.terminal("r") is None
    world.adapters.away = False
    assert (await _sent(world, worker, "r")).adapter == SQL.ref


async def test_workers_that_take_none_are_passed_over(world: World) -> None:
    without = await _worker(world, "a", max_adapters=0)
    having = await _worker(world, "b")
    world.adapters.offer(SQL)
    for number in range(3):
        await world.client.jobs.publish(job(f"r{number}", adapter="sql", adapter_version="1"))
    await world.until(lambda: len(having.running) == 3)
    assert not without.running


async def test_where_no_worker_takes_any_the_job_fails(world: World) -> None:
    await _worker(world, max_adapters=0)
    world.adapters.offer(SQL)
    await world.client.jobs.publish(job("r", adapter="sql", adapter_version="1"))
    await world.until(lambda: world.terminal("r") is not None)
    terminal = world.terminal("r")
    assert isinstance(terminal, Failed)
    assert terminal.code == "adapter_invalid"
    assert not isinstance(terminal, Done)
