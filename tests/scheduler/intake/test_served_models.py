"""Models that come and go while a scheduler runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.registry.routing.router import Route, Router
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.schemas.frames import Failed
from tests.scheduler.world import CONFIG, World, job, load_fake

_ROUTED = Router({"auto": Route(small="m", large="small")})


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Yield a world whose scheduler serves every model of the catalogue."""
    made = World(msgspec.structs.replace(CONFIG, models=()))
    await made.open()
    yield made
    await made.close()


async def _follow(world: World, *names: str, router: Router | None = None) -> None:
    scheduler = world.schedulers[0]
    changed = {*names} ^ {*scheduler.model_queues}
    await scheduler.follow(ModelCatalogue(names, load_fake, router), changed)


async def test_a_model_that_comes_is_served_and_the_others_go_on(world: World) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(job("before"))
    await world.until(lambda: "before" in worker.running)
    await _follow(world, "m", "small")
    newcomer = await world.add_worker(name="v", model="small")
    await world.client.jobs.publish(job("after", model="small"))
    await world.until(lambda: "after" in newcomer.running)
    for worker_, request_id in ((worker, "before"), (newcomer, "after")):
        await worker_.finish(request_id)
    await world.until(lambda: world.num_stored == 0)
    assert world.terminal("before") is None  # its worker tells the end
    await world.until(lambda: {status.model for status in world.statuses} == {"m", "small"})


async def test_the_jobs_of_a_model_that_goes_are_ended_wherever_they_are(world: World) -> None:
    await _follow(world, "m", "small")
    worker = await world.add_worker(name="v", model="small", num_slots=1)
    for number in range(20):  # one runs, few are pulled, the others are in the queue
        await world.client.jobs.publish(job(f"r{number}", model="small"))
    await world.until(lambda: len(worker.running) == 1)
    (runs,) = worker.running
    await _follow(world, "m")
    assert list(world.schedulers[0].model_queues) == ["m"]
    waiting = [f"r{number}" for number in range(20) if f"r{number}" != runs]
    await world.until(lambda: all(world.terminal(one) is not None for one in waiting))
    for request_id in waiting:
        ended = world.terminal(request_id)
        assert isinstance(ended, Failed)
        assert (ended.code, ended.retryable) == ("model_not_found", False)
        record = world.record(request_id)
        assert record is not None
    # What runs may end as ever.
    assert world.terminal(runs) is None
    await worker.finish(runs)
    await world.until(lambda: world.num_stored == 0)
    assert world.terminal(runs) is None  # its worker tells the end
    await world.until(lambda: len(world.schedulers[0].state.job_table) == 0)
    # The queue is watched as before.
    before = len(world.statuses)
    await world.until(lambda: len(world.statuses) > before)
    assert world.statuses[-1].model == "m"


async def test_what_its_worker_gives_back_is_ended(world: World) -> None:
    await _follow(world, "m", "small")
    worker = await world.add_worker(name="v", model="small")
    await world.client.jobs.publish(job("r", model="small"))
    await world.until(lambda: "r" in worker.running)
    await _follow(world, "m")
    await worker.kill()
    await world.until(lambda: isinstance(world.terminal("r"), Failed))
    await world.until(lambda: world.num_stored == 0)


async def test_a_model_comes_back_under_its_name(world: World) -> None:
    worker = await world.add_worker()
    await _follow(world, "small")
    await world.client.jobs.publish(job("refused"))
    await world.until(lambda: isinstance(world.terminal("refused"), Failed))
    await _follow(world, "m", "small")
    await world.client.jobs.publish(job("served"))
    await world.until(lambda: "served" in worker.running)
    await worker.finish("served")
    await world.until(lambda: world.num_stored == 0)


async def test_a_route_comes_and_goes_with_its_models(world: World) -> None:
    worker = await world.add_worker()
    await _follow(world, "m", "small", router=_ROUTED)
    await world.add_worker(name="v", model="small")
    await world.client.jobs.publish(job("r", model="auto", prompt="hi", prompt_token_ids=None))
    await world.until(lambda: "r" in worker.running)
    await worker.finish("r")
    await _follow(world, "m", router=Router())
    assert set(world.schedulers[0].pullers) == {"m"}
    await world.client.jobs.publish(job("s", model="auto", prompt="hi", prompt_token_ids=None))
    await world.until(lambda: isinstance(world.terminal("s"), Failed))


async def test_a_puller_that_came_later_ends_the_scheduler_with_its_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _follow(world, "m", "small")

    async def broken(*_: object) -> None:
        raise AssertionError("it pulls no more")

    monkeypatch.setattr(world.schedulers[0].pullers["small"], "_pull", broken)
    await world.add_worker(name="v", model="small")
    await world.client.jobs.publish(job("r", model="small"))
    with pytest.raises(AssertionError, match="it pulls no more"):
        await world.ended()
