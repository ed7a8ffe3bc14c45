"""Where the frames of a service's job may go."""

from __future__ import annotations

import pytest

from millrace.schemas.frames import Failed, Frame
from tests.scheduler.world import World, job


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


async def test_a_gateway_may_name_any(world: World) -> None:
    worker = await world.add_worker()
    world.reply_owners.tenants.add("acme")
    await world.client.jobs.publish(job("r1", reply="acme"), reserved=True)
    await world.client.jobs.publish(job("r2", tenant="shop", reply="acme"), reserved=True)
    await world.until(lambda: len(worker.running) == 2)
