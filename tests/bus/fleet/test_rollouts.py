"""Stored rollouts, on a real redis-server and in memory for tests of logic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from millrace.bus.fleet.rollouts import RolloutDirectory, RolloutStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from millrace.schemas.models.rollouts import (
    Rollout,
    RolloutConflictError,
    RolloutNotFoundError,
    RolloutReport,
    RolloutState,
    VersionFigures,
)
from tests.bus.fleet.memory_rollouts import MemoryRollouts, MemoryRolloutStore
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer

CHAT = Rollout(model="chat", stable="chat", candidate="chat@v2", abort_if="error_rate>0.01")
OTHER = Rollout(model="other", stable="other", candidate="other@v2")
FIGURES = (VersionFigures(version="chat", num_requests=3, percentiles_ms={"ttft_p95": 1.5}),)


@pytest.fixture(params=["redis", "memory"])
async def store(
    request: pytest.FixtureRequest, redis_server: RedisServer
) -> AsyncIterator[RolloutStore]:
    if request.param == "memory":
        yield MemoryRolloutStore()
        return
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    link = RedisLink(RedisConfig(url=redis_server.url))
    yield RolloutStore(link)
    await link.close()


def _ended(rollout: Rollout) -> Rollout:
    return replace(rollout, state=RolloutState.ABORTED)


async def test_one_rollout_of_a_model_goes_on_at_a_time(store: RolloutStore) -> None:
    started = await store.start(CHAT)
    assert started == replace(CHAT, revision=1)
    await store.start(OTHER)
    assert [one.model for one in await store.all()] == ["chat", "other"]
    with pytest.raises(RolloutConflictError, match="A rollout of chat to chat@v2 goes on"):
        await store.start(CHAT, started)
    with pytest.raises(RolloutConflictError, match="Another rollout of chat has just begun"):
        await store.start(CHAT)
    ended = await store.change(started, _ended(started))
    assert (await store.start(CHAT, ended)).revision == 3


async def test_one_of_several_concurrent_rollout_changes_is_made(store: RolloutStore) -> None:
    started = await store.start(CHAT)
    changes = [replace(started, percent=float(number)) for number in range(1, 9)]
    made = await asyncio.gather(*(store.change(started, one) for one in changes))
    stored = [one for one in made if one is not None]
    assert len(stored) == 1
    assert await store.find("chat") == stored[0]


async def test_a_change_needs_an_existing_rollout_and_a_former_version(store: RolloutStore) -> None:
    with pytest.raises(RolloutNotFoundError, match="no rollout of 'chat'"):
        await store.apply("chat", _ended)
    await store.start(CHAT)
    assert (await store.apply("chat", _ended)).state is RolloutState.ABORTED
    with pytest.raises(RolloutConflictError, match="nothing to turn back to of 'chat'"):
        await store.apply("chat", lambda _: None)


async def test_figures_belong_to_the_share_that_they_were_seen_at(store: RolloutStore) -> None:
    started = await store.start(CHAT)
    await store.put_figures(started, FIGURES)
    assert await store.report("chat") == RolloutReport(rollout=started, figures=FIGURES)
    changed = await store.change(started, replace(started, percent=20.0))
    assert changed is not None
    await store.put_figures(started, FIGURES)  # of what it was before
    assert await store.reports() == [RolloutReport(rollout=changed)]
    assert await store.report("other") is None


async def test_every_directory_knows_within_a_second(store: RolloutStore) -> None:
    clock = ManualClock()
    directory: RolloutDirectory
    if isinstance(store, MemoryRolloutStore):
        directory = MemoryRollouts(store, clock)
    else:
        directory = RolloutDirectory(store._link, clock)
    directory.start()
    started = await store.start(CHAT)
    assert directory.rollouts == {}
    for _ in range(100):
        await clock.advance(1.0)
        await asyncio.sleep(0.01)
        if directory.rollouts:
            break
    assert directory.rollouts == {"chat": started}
    await directory.close()
