"""A scheduler that has no job looks less often, and misses nothing for it."""

from __future__ import annotations

from millrace.scheduler.fleet.fleet import Departure
from millrace.scheduler.stages.watch import HealthMonitor
from tests.scheduler.world import CONFIG, World, job


async def test_a_worker_that_falls_silent_at_rest_is_noticed_soon_after_its_time() -> None:
    world = World(CONFIG)
    await world.open()
    worker = await world.add_worker()
    [scheduler] = world.schedulers
    await world.pass_s(5.0)
    assert scheduler.state.fleet.num_workers("m") == 1
    await worker.kill()
    await world.pass_s(CONFIG.heartbeat_timeout_s - 0.6)
    assert scheduler.state.fleet.num_workers("m") == 1
    await world.until(lambda: scheduler.state.departures[Departure.SILENT] == 1, within_s=1.2)
    await world.close()


async def test_a_job_ends_the_rest_of_the_ticks() -> None:
    world = World(CONFIG)
    await world.open()
    worker = await world.add_worker()
    [scheduler] = world.schedulers
    ticks: list[float] = []
    tick = HealthMonitor.tick

    def counted(self: HealthMonitor) -> None:
        ticks.append(world.clock.monotonic())
        tick(self)

    scheduler._health_monitor.tick = counted.__get__(scheduler._health_monitor)  # type: ignore[method-assign]
    await world.pass_s(10.0)
    assert 18 <= len(ticks) <= 22
    await world.pass_s(0.2)
    ticks.clear()
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await world.pass_s(1.0)
    assert len(ticks) >= 9
    await worker.finish("r1")
    await world.close()
