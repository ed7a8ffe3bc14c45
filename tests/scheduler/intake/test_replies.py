"""Permitted reply subjects for the frames of a service's job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import msgspec
import pytest

from millrace.registry.routing.router import Route, Router
from millrace.scheduler.intake.model_choice import ModelChooser
from millrace.schemas.frames import Failed, Frame, Shed
from millrace.schemas.tenants import LimitSet, TierLimits
from tests.scheduler.world import CONFIG, World, job


async def listen(world: World, reply: str) -> list[Frame]:
    frames: list[Frame] = []
    await world.client.frames.subscribe(reply, lambda _, frame: frames.append(frame))
    return frames


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_the_keyless_tenant_may_not_name_a_tenant_s_listener(
    world: World, *, is_repeated: bool
) -> None:
    worker = await world.add_worker()
    world.reply_owners.tenants.add("acme")
    own, foreign = await listen(world, "local"), await listen(world, "acme")
    if is_repeated:
        await world.client.jobs.publish(job("r1"))
        await world.until(lambda: "r1" in worker.running)
    await world.client.jobs.publish(job("r1", reply="acme", store_result=True))
    await world.until(lambda: len(own) == 1)
    (frame,) = own
    assert isinstance(frame, Failed)
    assert frame.code == ("duplicate" if is_repeated else "reply_forbidden")
    assert frame.param == ("" if is_repeated else "reply")
    assert foreign == []
    assert list(worker.running) == (["r1"] if is_repeated else [])


@pytest.fixture
async def routed() -> AsyncIterator[World]:
    """Jobs may leave the model open; no model takes token ids that are for another."""
    router = Router({"auto": Route(small="small", large="large")})
    config = msgspec.structs.replace(CONFIG, models=("small", "large"))
    tiers = TierLimits(free=LimitSet(concurrent_requests=1, max_waiting_jobs=1))
    world = World(config, models=("small", "large"), router=router, tiers=tiers)
    await world.open()
    yield world
    await world.close()


async def test_a_job_without_a_possible_model_may_not_name_a_tenants_listener(
    routed: World,
) -> None:
    world = routed
    worker = await world.add_worker("s", model="small")
    world.reply_owners.tenants.add("acme")
    own, foreign = await listen(world, "local"), await listen(world, "acme")
    await world.client.jobs.publish(job("r1", model="auto", reply="acme"))
    await world.until(lambda: len(own) == 1)
    await world.client.jobs.publish(job("r2", tenant="shop", model="small"))
    await world.until(lambda: "r2" in worker.running)
    await world.client.jobs.publish(job("r2", model="auto", reply="local"))
    await world.until(lambda: len(own) == 2)
    await world.client.jobs.publish(job("r3", model="none", reply="acme"))
    await world.until(lambda: len(own) == 3)
    await world.client.jobs.publish(job("r2", model="none", reply="local"))
    await world.until(lambda: len(own) == 4)
    assert [one.code for one in own if isinstance(one, Failed)] == [
        *("reply_forbidden", "duplicate"),
        *("reply_forbidden", "duplicate"),
    ]
    assert foreign == []
    assert "r2" not in world.running_requests.known, "it runs, though another publisher used its id"


async def test_a_bug_in_the_choice_of_a_model_ends_the_job(
    routed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = routed
    await world.add_worker("s", model="small")

    def choose(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(ModelChooser, "choose", choose)
    await world.client.jobs.publish(job("r1", model="auto", prompt="x", prompt_token_ids=None))
    await world.until(lambda: world.terminal("r1") is not None, within_s=2.0)
    end = world.terminal("r1")
    assert isinstance(end, Failed)
    assert "KeyError" in end.message
    await world.until(lambda: world.num_stored == 0)


async def test_a_shed_job_may_not_name_a_tenants_listener(routed: World) -> None:
    world = routed
    world.reply_owners.tenants.add("acme")
    own, foreign = await listen(world, "local"), await listen(world, "acme")
    admission = world.schedulers[0].state.admission
    assert admission is not None
    admission.max_waiting_jobs = AsyncMock(return_value=[1])  # type: ignore[method-assign]
    await world.client.jobs.publish(job("r1", model="small"))
    await world.client.jobs.publish(job("r2", model="small", reply="acme"))
    await world.until(lambda: bool(own))
    assert isinstance(own[0], Shed)
    assert foreign == []


async def test_a_gateway_may_name_any(world: World) -> None:
    worker = await world.add_worker()
    world.reply_owners.tenants.add("acme")
    await world.client.jobs.publish(job("r1", reply="acme"), reserved=True)
    await world.client.jobs.publish(job("r2", tenant="shop", reply="acme"), reserved=True)
    await world.until(lambda: len(worker.running) == 2)
