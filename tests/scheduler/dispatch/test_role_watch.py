"""Schedulers change the roles of workers as load asks for it; several do so as one would."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.scheduler.metrics import SchedulerMetrics
from millrace.scheduler.placement.role_balance import LASTS_S, REST_S
from millrace.schemas.engines import WorkerRole
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, World
from tests.support.scraped import scrape_of

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Yield a world whose scheduler switches roles."""
    world = World(msgspec.structs.replace(CONFIG, switch_roles=True))
    await world.open()
    yield world
    await world.close()


async def _fleet(world: World, num_prefill: int, num_decode: int) -> list[ScriptedWorker]:
    roles = [_PREFILL] * num_prefill + [_DECODE] * num_decode
    workers = []
    for number, role in enumerate(roles):
        worker = await world.add_worker(f"w{number}")
        worker.role, worker.prefill_tokens_per_s = role, 1_000.0
        await worker.announce()
        workers.append(worker)
    return workers


async def _overload(*workers: ScriptedWorker) -> None:
    for worker in workers:
        worker.outstanding_prompt_tokens = 100_000
        await worker.announce()


def _num_of(workers: list[ScriptedWorker], role: WorkerRole) -> int:
    return sum(worker.role is role for worker in workers)


def _num_changes(workers: list[ScriptedWorker]) -> int:
    return sum(len(worker.set_roles) for worker in workers)


@pytest.mark.parametrize("num_schedulers", [1, 3])
async def test_where_prompts_wait_workers_that_have_time_compute_them(
    world: World, num_schedulers: int
) -> None:
    for _ in range(num_schedulers - 1):
        await world.add_scheduler()
    workers = await _fleet(world, 1, 3)
    await _overload(workers[0])
    await world.until(lambda: _num_changes(workers) == 1)
    await world.pass_s(REST_S - 1.0)
    assert _num_changes(workers) == 1, "one at a time, from any scheduler"
    await world.until(lambda: _num_changes(workers) == 2)
    await world.pass_s(4 * REST_S)
    assert _num_of(workers, _DECODE) == 1, "one stays for streams"
    assert _num_changes(workers) == 2
    counted = [scheduler.roles.num_changes["m", "prefill"] for scheduler in world.schedulers]
    assert sum(counted) == 2


async def test_where_streams_have_no_room_workers_without_prompts_decode(world: World) -> None:
    workers = await _fleet(world, 3, 1)
    workers[3].num_blocks = 100
    full = msgspec.structs.replace(workers[3].status(), num_free_blocks=5, num_running=3)
    workers[3].status = lambda *, retired=False: msgspec.structs.replace(  # type: ignore[method-assign]
        full, sent_ns=world.clock.now_ns(), retired=retired
    )
    await workers[3].announce()
    await world.until(lambda: _num_of(workers, _DECODE) == 2)
    assert workers[0].set_roles == [_DECODE], "of equals the first"
    scraped = scrape_of(SchedulerMetrics(world.schedulers[0]))
    name = "millrace_scheduler_role_switches_total"
    assert scraped.value(name, model="m", result="decode") == 1


async def test_nothing_changes_where_load_is_even_or_switching_is_off(world: World) -> None:
    workers = await _fleet(world, 1, 2)
    await world.pass_s(4 * LASTS_S)
    await _overload(*workers)
    await world.pass_s(4 * LASTS_S)
    assert not _num_changes(workers)
    await world.close()
    world.config = CONFIG
    await world.add_scheduler()
    workers = await _fleet(world, 1, 2)
    await _overload(workers[0])
    await world.pass_s(4 * LASTS_S)
    assert not _num_changes(workers)


async def test_a_draining_worker_does_not_count_towards_its_role(world: World) -> None:
    workers = await _fleet(world, 1, 2)
    workers[1].draining = True
    await workers[1].announce()
    await _overload(workers[0])
    await world.pass_s(4 * LASTS_S)
    assert not _num_changes(workers)
