"""Limits while Redis is unreachable, full, or gone for good."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest

from millrace.bus.tenancy.errors import (
    ConcurrentRequestsError,
    InsufficientQuotaError,
    LimitsUnreachableError,
    TierContextError,
)
from millrace.gateway.tenancy.identity import LOCAL, Caller
from millrace.gateway.tenancy.limits import Limiter
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from millrace.schemas.jobs import Tier
from tests.support.limit_bench import LimitBench, header, reserve, used
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import eventually


async def test_without_redis_limits_are_the_process_own(bench: LimitBench) -> None:
    limiter = Limiter(
        RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), bench.clock),
        bench.config,
        bench.clock,
    )
    caller = Caller(tenant="acme", tier=Tier.FREE, key_id="abc", context_tokens=1_000)
    for number in range(8):
        made = await reserve(limiter, caller, f"r{number}")
        assert made.degraded
    assert header(made.headers, "x-ratelimit-remaining-requests") == "52"
    with pytest.raises(ConcurrentRequestsError):
        await reserve(limiter, caller, "r8")
    with pytest.raises(TierContextError):
        await reserve(limiter, caller, "r8", prompt=1_000)
    await limiter.settle("r0", used(10, 20), Decimal(0))
    part = await reserve(limiter, caller, "r7-r1", num_requests=0)
    assert header(part.headers, "x-ratelimit-remaining-requests") == "52"
    await limiter.settle("r7-r1", None, None)
    part = await reserve(limiter, caller, "r8", num_requests=0)
    assert header(part.headers, "x-ratelimit-remaining-requests") == "52"
    with pytest.raises(LimitsUnreachableError) as away:
        await reserve(limiter, caller, "batch", tier=Tier.BATCH)
    assert (away.value.http_status, away.value.retry_after_s) == (503, 2.0)
    assert limiter.num_degraded == 11
    assert (await reserve(limiter, LOCAL, "l1", tier=Tier.BATCH)).degraded


async def test_no_redis_at_all(bench: LimitBench) -> None:
    limiter = Limiter(None, bench.config, bench.clock)
    await reserve(limiter, LOCAL, "r1")
    assert not await limiter.settle("r1", used(1, 1), Decimal(1))
    limiter.settle_soon("r1", None, None)
    await limiter.close(1.0)
    assert limiter.settlements.num_lost == 0


async def test_redis_goes_and_comes_back(redis_server: RedisServer) -> None:
    bench = LimitBench(redis_server.url)
    try:
        await bench.link.call("FLUSHALL")
        await bench.tenant("acme", monthly_budget=Decimal(1), requests_per_minute=10)
        caller = await bench.caller("acme")
        await reserve(bench.limiter, caller, "before", cost="0.7")
        await bench.limiter.settle("before", used(1, 1), Decimal("0.7"))
        await reserve(bench.limiter, caller, "running", cost="0.1")
        redis_server.pause()
        try:
            made = await reserve(bench.limiter, caller, "meanwhile", cost="0.2")
            assert made.degraded
            with pytest.raises(InsufficientQuotaError):
                await reserve(bench.limiter, caller, "dear", cost="0.2")
            await reserve(bench.limiter, caller, "euro", cost="0.2", currency="EUR")
            bench.limiter.settle_soon("running", used(1, 1), Decimal("0.05"))
            bench.limiter.settle_soon("meanwhile", used(1, 1), Decimal("0.15"))
            bench.limiter.settle_soon("meanwhile", used(1, 1), Decimal("0.15"))
            await eventually(lambda: bench.clock.num_sleepers > 0)
            bench.limiter.settle_soon("euro", used(1, 1), Decimal("0.1"), "EUR")
            assert bench.limiter.settlements.num_waiting == 4
        finally:
            redis_server.resume()
        while bench.limiter.settlements.num_waiting:
            await bench.clock.advance(1.1)
            await asyncio.sleep(0.01)
        [(_, tenant), _] = await bench.limiter.usage(caller)
        assert tenant.spend().spent_nano == 900_000_000
        await reserve(bench.limiter, caller, "later", cost="0.1", currency="EUR")
        [(_, tenant), _] = await bench.limiter.usage(caller)
        assert tenant.spend("EUR") == (100_000_000, 100_000_000)
        await bench.limiter.settle("later", None, None)
        [(_, tenant), _] = await bench.limiter.usage(caller)
        assert (tenant.num_running, tenant.spend().held_nano) == (0, 0)
        assert not (await reserve(bench.limiter, caller, "after", cost="0.1")).degraded
    finally:
        await bench.close()


async def test_settlements_are_given_up_after_ten_minutes(bench: LimitBench) -> None:
    limiter = Limiter(
        RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), bench.clock),
        bench.config,
        bench.clock,
    )
    limiter.settle_soon("r1", used(1, 1), Decimal(1))
    await eventually(lambda: bench.clock.num_sleepers > 0)
    assert limiter.settlements.num_waiting == 1
    await bench.clock.advance(601.0)
    await eventually(lambda: limiter.settlements.num_waiting == 0)
    assert limiter.settlements.num_lost == 1
    await limiter.close(1.0)


async def test_a_redis_that_refuses_to_write_is_away(bench: LimitBench) -> None:
    await bench.tenant("acme")
    caller = await bench.caller("acme")
    await bench.link.call("CONFIG", "SET", "maxmemory", "1")
    try:
        assert (await reserve(bench.limiter, caller, "r1")).degraded
    finally:
        await bench.link.call("CONFIG", "SET", "maxmemory", "0")
    assert not (await reserve(bench.limiter, caller, "r2")).degraded
