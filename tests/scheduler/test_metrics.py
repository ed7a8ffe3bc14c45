"""Metrics of a scheduler as Prometheus reads them."""

from __future__ import annotations

import msgspec

from millrace.scheduler.metrics import SchedulerMetrics
from millrace.schemas.control import Cancel
from millrace.schemas.jobs import Tier
from tests.scheduler.world import CONFIG, World, job
from tests.support.scraped import Scraped, scrape_of


def _scrape(world: World) -> Scraped:
    return scrape_of(SchedulerMetrics(world.schedulers[0]))


async def test_the_queue_and_the_dispatches_are_counted(world: World) -> None:
    worker = await world.add_worker(num_slots=2)
    for number in range(5):
        await world.client.jobs.publish(
            job(f"r{number}", received_ns=world.clock.now_ns(), tenant="secret")
        )
    await world.until(lambda: len(worker.running) == 2)
    await world.until(lambda: len(world.schedulers[0].model_queues["m"].queue) == 2)
    await world.pass_s(1.0)
    scraped = _scrape(world)
    assert scraped.value("millrace_scheduler_queued_jobs", model="m") == 3
    assert scraped.value("millrace_scheduler_held_jobs", model="m", tier="free") == 2
    assert scraped.value("millrace_scheduler_held_jobs", model="m", tier="pro") == 0
    assert scraped.value("millrace_scheduler_running_jobs", model="m") == 2
    oldest = "millrace_scheduler_oldest_wait_seconds"
    assert scraped.value(oldest, model="m", tier="free") >= 1.0
    assert scraped.value(oldest, model="m", tier="batch") == 0
    assert scraped.value("millrace_scheduler_workers", model="m") == 1
    accepted = scraped.value("millrace_scheduler_dispatches_total", model="m", result="accepted")
    assert accepted == 2
    await worker.finish_all()
    await world.until(lambda: len(worker.running) == 2)
    running = _scrape(world)
    name = "millrace_scheduler_queue_time_seconds"
    assert running.value(f"{name}_count", model="m", tier="free") == 4
    assert running.value(f"{name}_sum", model="m", tier="free") >= 2.0
    assert running.value("millrace_scheduler_dispatch_duration_seconds_count", model="m") == 4


async def test_runs_that_leave_their_worker_are_counted_by_why(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    await first.kill()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running)
    third = await world.add_worker("c")
    second.draining = True
    await second.announce()
    await world.until(lambda: "r1" in third.running)
    scraped = _scrape(world)
    assert scraped.value("millrace_scheduler_reruns_total", model="m", why="lost") == 1
    assert scraped.value("millrace_scheduler_reruns_total", model="m", why="moved") == 1
    assert scraped.value("millrace_scheduler_departed_workers_total", why="silent") == 1
    assert scraped.value("millrace_scheduler_draining_workers", model="m") == 1


async def test_what_ends_without_a_worker_is_counted_by_why() -> None:
    world = World(msgspec.structs.replace(CONFIG, max_queued_jobs=2))
    await world.open()
    try:
        worker = await world.add_worker(num_slots=1)
        for number in range(8):
            await world.client.jobs.publish(job(f"r{number}"), reserved=True)
        await world.until(lambda: "r0" in worker.running and world.num_stored <= 3)
        await world.client.control.cancel(Cancel(request_id="r1"))
        await world.client.jobs.publish(job("stray", model="nobody-knows-this-one"))
        await world.until(lambda: world.num_stored <= 2)
        scraped = _scrape(world)
        name = "millrace_scheduler_ended_jobs_total"
        assert scraped.value(name, model="m", status="shed", code="queue_full") >= 4
        assert scraped.value(name, model="m", status="cancelled", code="cancelled") == 1
        assert scraped.value(name, model="other", status="failed", code="model_not_found") == 1
    finally:
        await world.close()


async def test_the_fairness_gap_is_that_of_those_who_wait(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    await world.client.jobs.publish(job("first", tenant="a"))
    await world.until(lambda: "first" in worker.running)
    gap = "millrace_scheduler_fairness_gap_tokens"
    assert _scrape(world).value(gap, model="m", tier="free") == 0
    for tenant in ("a", "b"):
        await world.client.jobs.publish(job(f"next of {tenant}", tenant=tenant))
    queue = world.schedulers[0].model_queues["m"].queue
    await world.until(lambda: len(queue) == 2)
    counters = queue.counters(Tier.FREE)
    wanted = counters.counter("a") - counters.counter("b")
    assert _scrape(world).value(gap, model="m", tier="free") == abs(wanted)
