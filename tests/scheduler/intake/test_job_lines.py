"""Jobs that services publish wait for their tenants' limits, and keep others from nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.registry.routing.router import Route, Router
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.admission import JobAdmission, Learn, NotYet
from millrace.scheduler.jobs.admission import Places as PlacesLeft
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.jobs.tenant_lines import TenantLines
from millrace.scheduler.jobs.terminal_status import EXPIRED, TerminalStatus
from millrace.schemas.control import Cancel
from millrace.schemas.frames import Cancelled, Done, Expired, Queued, Shed
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitSet, TierLimits
from tests.scheduler.scheduled_jobs import scheduled_job
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, World, job
from tests.support.manual_clock import ManualClock

_CONFIG = msgspec.structs.replace(CONFIG, window_jobs_per_tenant=8)
_NS_PER_S = 1_000_000_000


async def open_world(free: LimitSet) -> World:
    """Open a world with these limits for tenants of the tier ``free``."""
    world = World(_CONFIG, tiers=TierLimits(free=free))
    await world.open()
    return world


@pytest.fixture
async def two_at_once() -> AsyncIterator[World]:
    world = await open_world(LimitSet(concurrent_requests=2))
    yield world
    await world.close()


async def publish(world: World, count: int, tenant: str = "acme", **changes: object) -> None:
    for number in range(count):
        await world.client.jobs.publish(job(f"{tenant}-{number}", tenant=tenant, **changes))


def num_running(worker: ScriptedWorker, tenant: str) -> int:
    return sum(dispatch.job.tenant == tenant for dispatch in worker.running.values())


async def test_jobs_over_the_concurrency_wait_and_all_are_done(two_at_once: World) -> None:
    world = two_at_once
    worker = await world.add_worker(num_slots=8)
    await publish(world, 40)
    await world.until(lambda: num_running(worker, "acme") == 2)
    num_done = 0
    while num_done < 40:
        await world.until(lambda: bool(worker.running), within_s=0.5)
        await world.pass_s(0.1)
        assert num_running(worker, "acme") == min(2, 40 - num_done), "an end starts the next"
        assert len(world.schedulers[0].state.job_table) <= 2 + 1, "the queue is in JetStream"
        await worker.finish(next(iter(worker.running)))
        num_done += 1
    await world.until(lambda: not world.num_stored)
    assert [dispatch.job.request_id for dispatch in worker.history] == [
        f"acme-{number}" for number in range(40)
    ]
    await world.until(lambda: len([one for _, one in world.frames if isinstance(one, Done)]) == 40)


async def test_a_line_takes_no_place_of_others(two_at_once: World) -> None:
    """Not of other tenants, nor of requests that a gateway admitted for the same one."""
    world = two_at_once
    worker = await world.add_worker(num_slots=4)
    await publish(world, 30)
    await world.until(lambda: num_running(worker, "acme") == 2)
    queue = world.schedulers[0].model_queues["m"].queue
    await world.pass_s(1.0)
    assert queue.num_here(Tier.FREE) == 0, "those held are not in the window"
    await world.client.jobs.publish(job("web", tenant="acme"), reserved=True)
    await world.client.jobs.publish(job("other", tenant="shop"))
    await world.until(lambda: {"web", "other"} <= worker.running.keys(), within_s=0.5)


async def test_what_waits_for_its_tenant_is_told_where_it_stands(two_at_once: World) -> None:
    world = two_at_once
    worker = await world.add_worker(num_slots=8)
    await publish(world, 12)
    await world.until(lambda: num_running(worker, "acme") == 2)
    await world.pass_s(1.0)
    await world.pass_s(1.0)
    positions = [one for one in world.frames if isinstance(one[1], Queued)]
    assert positions == [("acme-2", Queued(position=0))], "the wait is unknown"


async def test_held_jobs_end_when_they_are_cancelled_or_too_late(two_at_once: World) -> None:
    world = two_at_once
    worker = await world.add_worker(num_slots=8)
    deadline_ns = world.clock.now_ns() + 20 * _NS_PER_S
    await publish(world, 6, deadline_ns=deadline_ns)
    await world.until(lambda: len(worker.running) == 2)
    await world.until(lambda: len(list(world.schedulers[0].state.lines.held())) == 1)
    await world.client.control.cancel(Cancel(request_id="acme-2"))
    await world.until(lambda: world.terminal("acme-2") is not None, within_s=0.5)
    assert isinstance(world.terminal("acme-2"), Cancelled)
    await world.until(lambda: world.clock.now_ns() >= deadline_ns)
    await world.until(lambda: world.num_stored == 2, within_s=1.0)
    assert all(isinstance(world.terminal(f"acme-{number}"), Expired) for number in (3, 4, 5))
    assert not list(world.schedulers[0].state.lines.held())


async def test_models_take_turns_at_the_places_of_one_tenant() -> None:
    tiers = TierLimits(free=LimitSet(concurrent_requests=1))
    config = msgspec.structs.replace(_CONFIG, models=("small", "large"))
    world = World(config, models=("small", "large"), tiers=tiers)
    await world.open()
    try:
        workers = [await world.add_worker(model, model=model) for model in ("small", "large")]
        for number in range(10):
            for model in ("small", "large"):
                await world.client.jobs.publish(job(f"{model}-{number}", tenant="a", model=model))
        for num_done in range(20):
            await world.until(lambda: any(worker.running for worker in workers), within_s=2.0)
            counts = [len(worker.history) for worker in workers]
            assert sum(counts) == num_done + 1
            assert abs(counts[0] - counts[1]) <= 2, counts
            [busy] = [worker for worker in workers if worker.running]
            await busy.finish(next(iter(busy.running)))
    finally:
        await world.close()


async def test_jobs_that_leave_the_model_open_wait_in_the_same_line() -> None:
    router = Router({"auto": Route(small="small", large="large")})
    config = msgspec.structs.replace(_CONFIG, models=("small", "large"))
    tiers = TierLimits(free=LimitSet(concurrent_requests=2, max_waiting_jobs=6))
    world = World(config, models=("small", "large"), router=router, tiers=tiers)
    await world.open()
    try:
        worker = await world.add_worker("s", num_slots=8, model="small")
        for number in range(6):
            words = {"prompt": "What is a lease?", "prompt_token_ids": None}
            open_ = job(f"open-{number}", tenant="a", model="auto", **words)
            await world.client.jobs.publish(open_)
            await world.client.jobs.publish(job(f"small-{number}", tenant="a", model="small"))
        await world.until(lambda: world.num_stored == 8)
        await world.pass_s(2.0)
        shed = [frame for _, frame in world.frames if isinstance(frame, Shed)]
        assert len(shed) == 4, "two run and six wait, whichever name they have"
        for _ in range(8):
            await world.until(lambda: bool(worker.running), within_s=2.0)
            await world.pass_s(0.2)
            assert len(worker.running) <= 2
            await worker.finish(next(iter(worker.running)))
        await world.until(lambda: not world.num_stored)
    finally:
        await world.close()


async def test_a_limit_per_minute_is_a_pace() -> None:
    world = await open_world(LimitSet(requests_per_minute=60))
    try:
        worker = await world.add_worker(num_slots=100)
        begun_s = world.clock.monotonic()
        await publish(world, 70)
        await world.until(lambda: len(worker.history) >= 60)
        # A place comes free each second, and not a moment before.
        await world.until(lambda: len(worker.history) == 70)
        assert 10.0 <= world.clock.monotonic() - begun_s <= 15.0
    finally:
        await world.close()


async def test_a_tenant_may_have_so_many_jobs_waiting() -> None:
    world = await open_world(LimitSet(concurrent_requests=2, max_waiting_jobs=5))
    try:
        worker = await world.add_worker(num_slots=8)
        await publish(world, 4)
        await world.until(lambda: len(worker.running) == 2)
        await publish(world, 100, "shop")
        await world.until(lambda: world.num_stored < 20)
        await world.pass_s(2.0)
        shed = [frame for _, frame in world.frames if isinstance(frame, Shed)]
        assert {(frame.limit, frame.message) for frame in shed} == {
            (
                "max_waiting_jobs",
                (
                    "Limit max_waiting_jobs of tenant shop reached: 5 jobs wait in tier free. "
                    "Publish more when some of them have ended."
                ),
            )
        }
        assert all(frame.retry_after_s > 0 for frame in shed)
        left = [number for number in range(100) if world.terminal(f"shop-{number}") is None]
        assert left == list(range(7)), "two run, five wait, the newest are shed"
    finally:
        await world.close()


async def test_the_bound_is_that_of_the_tier_in_which_jobs_are_published() -> None:
    tiers = TierLimits(
        free=LimitSet(concurrent_requests=1, max_waiting_jobs=2),
        batch=LimitSet(max_waiting_jobs=50),
    )
    world = World(_CONFIG, tiers=tiers)
    await world.open()
    try:
        await publish(world, 40, tier=Tier.BATCH)
        await world.pass_s(2.0)
        assert world.num_stored == 40
    finally:
        await world.close()


async def test_another_scheduler_goes_on_with_what_one_held(two_at_once: World) -> None:
    world = two_at_once
    worker = await world.add_worker(num_slots=8)
    await publish(world, 10)
    await world.until(lambda: len(worker.running) == 2)
    await world.add_scheduler()
    await world.kill_scheduler()
    for _ in range(10):
        await world.until(lambda: bool(worker.running), within_s=20.0)
        await worker.finish(next(iter(worker.running)))
    await world.until(lambda: not world.num_stored)
    started = [dispatch.job.request_id for dispatch in worker.history]
    assert sorted(set(started)) == [f"acme-{number}" for number in range(10)]


async def test_a_missed_end_is_found_by_asking_again(two_at_once: World) -> None:
    world = two_at_once
    worker = await world.add_worker(num_slots=8)
    await publish(world, 4)
    await world.until(lambda: len(worker.running) == 2)
    worker.tells_ends = False
    for _ in range(2):
        await worker.finish(next(iter(worker.running)))
    await world.until(lambda: len(worker.history) == 4, within_s=60.0)


# --- the line alone, in any order of events ---


class Places(JobAdmission):
    """Admission with a fixed number of places, which answers after a moment."""

    def __init__(self, num_places: int, clock: ManualClock) -> None:
        self.num_free = num_places
        self.admitted: list[ScheduledJob] = []
        self._clock = clock

    async def admit(
        self, scheduled: ScheduledJob, learn: Learn = lambda _tenant, _places: None
    ) -> TerminalStatus | NotYet | None:
        await asyncio.sleep(0)
        is_granted = self.num_free > 0
        if is_granted:
            self.num_free -= 1
            self.admitted.append(scheduled)
        learn(scheduled.job.tenant, PlacesLeft(self.num_free, is_granted))
        return None if is_granted else NotYet(1.0, ends_free_it=True)


_STEPS = st.lists(st.sampled_from(["arrive", "end", "cancel", "lost end", "wait"]), max_size=60)


@settings(max_examples=60, deadline=None)
@given(steps=_STEPS, num_places=st.integers(1, 4), seed=st.integers(0, 1 << 16))
def test_every_job_of_a_line_is_admitted_or_ended(
    steps: list[str], num_places: int, seed: int
) -> None:
    asyncio.run(_live(steps, num_places, random.Random(seed)))


async def _live(steps: list[str], num_places: int, chance: random.Random) -> None:
    clock, tasks = ManualClock(), Tasks()
    admission = Places(num_places, clock)
    lines = TenantLines(admission, clock, tasks)
    running = asyncio.create_task(lines.run())
    ends: dict[ScheduledJob, list[TerminalStatus | None]] = {}
    active: list[ScheduledJob] = []

    async def arrive() -> None:
        scheduled = scheduled_job("acme", priority=chance.randint(-1, 1))
        scheduled.phase = JobPhase.PREPARING
        ends[scheduled] = []
        lines.undecided(scheduled)

        await lines.admit(scheduled)
        lines.decided(scheduled)
        if scheduled.phase is JobPhase.HELD:
            tasks.spawn(admitted(scheduled), "wait for a place")
        else:
            start(scheduled)

    async def admitted(scheduled: ScheduledJob) -> None:
        await lines.until_admitted(scheduled)
        if scheduled.phase is JobPhase.HELD:
            start(scheduled)

    def start(scheduled: ScheduledJob) -> None:
        ends[scheduled].append(None)
        scheduled.enter(JobPhase.WAITING)
        active.append(scheduled)

    def cancel(scheduled: ScheduledJob) -> None:
        ends[scheduled].append(EXPIRED)
        scheduled.enter(JobPhase.ENDED)
        lines.leave(scheduled)

    def end(*, is_heard: bool) -> None:
        if active:
            active.pop(chance.randrange(len(active)))
            admission.num_free += 1
            if is_heard:
                lines.freed("acme")

    for step in steps:
        match step:
            case "arrive":
                await arrive()
            case "end" | "lost end":
                end(is_heard=step == "end")
            case "cancel":
                if held := list(lines.held()):
                    cancel(chance.choice(held))
            case _:
                await clock.advance(chance.random() * 3)
        assert len(active) <= num_places
    while active or list(lines.held()):
        end(is_heard=chance.random() < 0.5)
        await clock.advance(17.0)
        assert len(active) <= num_places
    assert all(len(one) == 1 for one in ends.values()), "each is decided once"
    running.cancel()
    await tasks.close()
    await asyncio.gather(running, return_exceptions=True)
