"""Batches of dead gateways: each line is answered once and none is lost."""

from __future__ import annotations

from collections import Counter

from redis.asyncio import Redis

from millrace.bus import redis_keys
from millrace.gateway.batches.runner import RELEASE
from millrace.schemas.config import RedisConfig
from tests.support.batches.batch_system import (
    Connect,
    batch_gateway,
    batch_worker,
    by_id,
    chat_line,
    in_memory,
)
from tests.support.batches.batch_worker import BatchWorker
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


async def test_each_line_once_though_its_gateway_dies(
    connect: Connect, redis: RedisConfig, worker: BatchWorker
) -> None:
    num_lines = 300
    lines = [chat_line(f"c{number}", f"hello {number}") for number in range(num_lines)]
    async with batch_gateway(connect, redis) as first:
        worker.hold_after = 100
        batch = await first.begin(lines)
        await eventually(lambda: worker.num_running >= 100)
        await first.die()
        async with batch_gateway(connect, redis) as second:
            worker.release()
            batch = await second.end(batch)
            assert batch.status == "completed"
            answers = by_id(await second.lines(batch.output_file_id))
            assert set(answers) == {line["custom_id"] for line in lines}
    assert Counter(worker.answers.values()) == {1: num_lines}


async def test_a_gateway_that_goes_down_in_order_hands_it_over_at_once(
    connect: Connect, redis: RedisConfig, worker: BatchWorker
) -> None:
    lines = [chat_line(f"c{number}", f"hello {number}") for number in range(50)]
    async with batch_gateway(connect, redis) as first:
        worker.hold_after = 10
        batch = await first.begin(lines)
        await eventually(lambda: worker.num_running == 40)
    async with batch_gateway(connect, redis) as second:
        worker.release()
        batch = await second.end(batch)
        assert len(by_id(await second.lines(batch.output_file_id))) == 50
    assert Counter(worker.answers.values()) == {1: 50}


async def test_two_gateways_that_both_think_that_they_run_it(
    connect: Connect, redis: RedisConfig, worker: BatchWorker
) -> None:
    lines = [chat_line(f"c{number}", f"hello {number}") for number in range(200)]
    async with (
        batch_gateway(connect, redis) as first,
        batch_gateway(connect, redis) as second,
    ):
        worker.hold_after = 50
        batch = await first.begin(lines)
        await eventually(lambda: worker.num_running >= 50)
        runners = [front.server._batches for front in (first, second)]
        await eventually(lambda: {runner.num_running for runner in runners} == {0, 1})
        old, new = sorted(runners, key=lambda runner: -runner.num_running)
        key = redis_keys.batch_lease_key(batch.id)

        async def is_taken() -> bool:
            # Until the other one looks, the owner would take it back. In one go, or it might be the
            # other one's by the time that it is deleted.
            await client.eval(RELEASE.source, 1, key, old._holder)
            return new.num_running == 1

        # Unlike the gateway's link, this client waits for Redis however long it takes.
        async with Redis.from_url(redis.url) as client:
            await eventually(is_taken)
        worker.release()
        batch = await first.end(batch)
        assert batch.status == "completed"
        assert len(by_id(await first.lines(batch.output_file_id))) == 200
        await eventually(lambda: old.num_running == new.num_running == 0)
    assert Counter(worker.answers.values()) == {1: 200}


async def test_redis_goes_away_and_comes_back(
    redis_server: RedisServer, redis: RedisConfig
) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis) as front, batch_worker(connect) as worker:
        worker.hold_after = 10
        batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(40)])
        await eventually(lambda: worker.num_running == 30)
        redis_server.kill()
        try:
            worker.release()
            await eventually(lambda: len(worker.answers) == 40)
        finally:
            redis_server.start()
        batch = await front.end(batch)
        assert batch.status == "completed"
        assert len(by_id(await front.lines(batch.output_file_id))) == 40
    assert Counter(worker.answers.values()) == {1: 40}
