"""Index of running requests and their workers, on a real redis-server and without one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from millrace.bus import running_requests
from millrace.bus.running_requests import (
    CANCELS_TTL_S,
    TTL_S,
    JobClaim,
    RunningRequest,
    RunningRequestIndex,
)
from millrace.schemas.config import RedisConfig
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer, free_port


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[RunningRequestIndex]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = RunningRequestIndex(RedisConfig(url=f"{redis_server.url}/0"))
    yield made
    await made.close()


async def test_the_first_model_that_is_chosen_stays(index: RunningRequestIndex) -> None:
    assert await index.settle_model("r 1", "large", "code") == ("large", "code")
    assert await index.lookup("r 1") is None
    await index.start("r 1", "w1", 65)
    assert await index.settle_model("r 1", "small", "short") == ("large", "code")
    assert await index.lookup("r 1") == RunningRequest(worker_id="w1", epoch=65, finished=False)


async def test_an_id_is_of_the_message_that_claims_it_first(index: RunningRequestIndex) -> None:
    mine = JobClaim(sequence=7, digest="d", reply="a/b", tenant="a")
    other = JobClaim(sequence=8, digest="e", reply="", tenant="b")
    assert await index.claim("r 1", mine, is_new=True) is None
    assert await index.claim("r 1", other, is_new=True) == mine
    assert await index.claim("r 1", other, is_new=False) == mine
    await index.start("r 1", "w1", 65)
    # Its own, delivered again.
    assert await index.claim("r 1", mine, is_new=False) is None
    assert await index.claim("r 1", other, is_new=True, void_sequence=6) == mine
    assert await index.claim("r 1", other, is_new=True, void_sequence=7) is None
    assert await index.claim("r 1", mine, is_new=True) == other


async def test_a_tenant_learns_whether_its_own_request_has_ended(
    index: RunningRequestIndex,
) -> None:
    assert await index.has_ended("a", "r 1") is None
    await index.claim("r 1", JobClaim(sequence=7, digest="d", tenant="a"), is_new=True)
    assert await index.has_ended("a", "r 1") is False
    await index.start("r 1", "w1", 65)
    assert await index.has_ended("a", "r 1") is False
    await index.finish("r 1", "w1", 65)
    assert await index.has_ended("a", "r 1") is True
    assert await index.has_ended("b", "r 1") is None


async def test_a_shed_job_does_not_end_another_job_of_its_id(index: RunningRequestIndex) -> None:
    await index.claim("r1", JobClaim(sequence=7, digest="d", tenant="a"), is_new=True)
    await index.finish("r1", "", 0)
    assert await index.has_ended("a", "r1") is False
    await index.finish("r2", "", 0)
    assert await index.lookup("r2") == RunningRequest(worker_id="", epoch=0, finished=True)


async def test_cancels_are_kept_for_each_tenant_up_to_a_bound(
    index: RunningRequestIndex, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_requests, "MAX_CANCELS", 3)
    await index.note_cancels("a b", ["r 0"])
    for ids in (["r 0", "r 1"], ["r 2"], ["r 3", "r 4"]):
        await index.note_cancels("c", ids)
    assert await index.was_cancelled("a b", "r 0")
    assert not await index.was_cancelled("a b", "r 4")
    cancelled = [await index.was_cancelled("c", f"r {number}") for number in range(5)]
    assert cancelled == [False, False, True, True, True]
    client = Redis.from_url(redis_server.url)
    assert CANCELS_TTL_S - 5 <= await client.ttl("cancels:c") <= CANCELS_TTL_S
    await client.aclose()


async def test_an_id_that_runs_without_a_claim(index: RunningRequestIndex) -> None:
    """The id is a gateway's, which claims none, or a service's whose claim was lost."""
    mine = JobClaim(sequence=7, digest="d", reply="a", tenant="a")
    await index.start("r1", "w1", 65)
    assert await index.claim("r1", mine, is_new=True) == JobClaim(sequence=0)
    assert await index.claim("r1", mine, is_new=False) is None


async def test_a_life_of_a_request(index: RunningRequestIndex, redis_server: RedisServer) -> None:
    assert await index.lookup("r 1") is None
    await index.start("r 1", "w1", 65)
    assert await index.lookup("r 1") == RunningRequest(worker_id="w1", epoch=65, finished=False)
    await index.start("r 1", "w2", 66)
    assert await index.lookup("r 1") == RunningRequest(worker_id="w2", epoch=66, finished=False)
    await index.finish("r 1", "w2", 66)
    assert await index.lookup("r 1") == RunningRequest(worker_id="w2", epoch=66, finished=True)
    client = Redis.from_url(redis_server.url)
    assert TTL_S - 5 <= await client.ttl("gen:r 1") <= TTL_S
    await client.aclose()


async def test_a_superseded_run_changes_nothing(index: RunningRequestIndex) -> None:
    await index.start("r1", "w2", 66)
    await index.start("r1", "w1", 65)
    await index.finish("r1", "w1", 65)
    assert await index.lookup("r1") == RunningRequest(worker_id="w2", epoch=66, finished=False)
    await index.finish("r1", "w2", 66)
    await index.start("r1", "w3", 67)
    assert await index.lookup("r1") == RunningRequest(worker_id="w2", epoch=66, finished=True)


async def test_the_index_has_the_leases_of_a_workers_requests(
    index: RunningRequestIndex, redis_server: RedisServer
) -> None:
    assert await index.held_by("w1") == {}
    for request_id in ("r 1", "r2", "r3"):
        await index.start(request_id, "w1", 65, f"lease of {request_id}")
    await index.finish("r2", "w1", 65)
    await index.drop("r3", "w1")
    assert await index.held_by("w1") == {"r 1": "lease of r 1"}
    await index.start("r 1", "w2", 66, "the next")
    await index.start("r 1", "w1", 65, "an older run's")
    assert await index.held_by("w2") == {"r 1": "the next"}
    assert await index.held_by("w1") == {"r 1": "lease of r 1"}, "a reader checks the holder"
    client = Redis.from_url(redis_server.url)
    assert TTL_S - 5 <= await client.ttl("held:w1") <= TTL_S
    await client.aclose()


async def test_many_at_once(index: RunningRequestIndex) -> None:
    await asyncio.gather(*(index.start(f"r{number}", "w", number) for number in range(2000)))
    found = await asyncio.gather(*(index.lookup(f"r{number}") for number in range(2000)))
    assert [one.epoch for one in found if one] == list(range(2000))


async def test_without_redis_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    index = RunningRequestIndex(RedisConfig(url=f"redis://127.0.0.1:{free_port()}/0"))
    with caplog.at_level(logging.INFO, "millrace.bus.running_requests"):
        for _ in range(5):
            await index.start("r1", "w1", 1)
            assert await index.lookup("r1") is None
            await index.finish("r1", "w1", 1)
            assert await index.settle_model("r1", "small", "short") == ("small", "short")
    assert len(caplog.records) == 1
    await index.close()
    await index.close()
    assert await index.lookup("r1") is None


async def test_the_index_works_again_after_a_restart_of_redis(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    index = RunningRequestIndex(RedisConfig(url=redis_server.url), clock)
    await index.start("r1", "w1", 1)
    redis_server.kill()
    try:
        assert await index.lookup("r1") is None
    finally:
        redis_server.start()
    assert await index.lookup("r1") is None
    await clock.advance(2.0)
    await index.start("r1", "w2", 2)
    assert await index.lookup("r1") == RunningRequest(worker_id="w2", epoch=2, finished=False)
    await index.close()


async def test_a_hung_redis_costs_little(redis_server: RedisServer) -> None:
    index = RunningRequestIndex(RedisConfig(url=redis_server.url))
    await index.start("r1", "w1", 1)
    redis_server.pause()
    try:
        started_s = time.monotonic()
        for _ in range(20):
            assert await index.lookup("r1") is None
        assert time.monotonic() - started_s < 1.0
    finally:
        redis_server.resume()
    await index.close()
