"""Limiters over a real Redis with the test's clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from millrace.bus.tenancy.accounts import Demand
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.tenancy.identity import Caller, Identity
from millrace.gateway.tenancy.limits import Limiter, rate_headers
from millrace.gateway.transport.http import Headers
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.manual_clock import ManualClock

START_NS = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()) * 1_000_000_000


class LimitBench:
    """Limiters, and the tenants and callers that they know. ``close`` ends them."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock(START_NS)
        self.link = RedisLink(RedisConfig(url=url), self.clock)
        self.store = TenantStore(self.link)
        self.config = GatewayConfig(host="0.0.0.0")
        self.limiters: list[Limiter] = []
        self.limiter = self.new_limiter()

    def new_limiter(self) -> Limiter:
        """Another gateway's."""
        limiter = Limiter(self.link, self.config, self.clock, redis_time=False)
        self.limiters.append(limiter)
        return limiter

    async def tenant(self, name: str, tier: Tier = Tier.PRO, **limits: Any) -> None:
        record = TenantRecord(tier=tier, limits=LimitOverrides(**limits))
        await self.store.change_tenant(name, lambda _known: record)

    async def caller(self, tenant: str, **limits: Any) -> Caller:
        _, token = await self.store.create_key(
            tenant, self.clock.now_ns(), limits=LimitOverrides(**limits)
        )
        identity = Identity(self.link, self.config, self.clock)
        return await identity.caller_of_token(token)

    async def keys(self) -> set[str]:
        """Return the keys in Redis except for records of keys and tenants."""
        found: list[bytes] = await self.link.call("KEYS", "*")
        return {
            key.decode()
            for key in found
            if key.decode().partition(":")[0] not in {"key", "tenant", "tenants", "tenant-keys"}
        }

    async def close(self) -> None:
        for limiter in self.limiters:
            await limiter.close(1.0)
        await self.link.close()


class Reserved(NamedTuple):
    """The headers that a client gets, and whether Redis was unreachable."""

    headers: Headers
    degraded: bool


async def reserve(
    limiter: Limiter,
    caller: Caller,
    request_id: str,
    *,
    prompt: int = 10,
    completion: int = 90,
    cost: str = "0",
    deadline_s: float = 600.0,
    tier: Tier | None = None,
    longest: int | None = None,
    currency: str = "USD",
    num_requests: int = 1,
) -> Reserved:
    demand = Demand(
        request_id=request_id,
        tier=tier or caller.tier,
        num_prompt_tokens=prompt,
        max_tokens=completion,
        longest_tokens=longest,
        cost=Decimal(cost),
        currency=currency,
        deadline_s=deadline_s,
        num_requests=num_requests,
    )
    granted = await limiter.reserve(caller, demand)
    return Reserved(rate_headers(granted.accounts, granted.usages), granted.degraded)


def header(headers: Sequence[tuple[bytes, bytes]], name: str) -> str:
    return dict(headers)[name.encode()].decode()


def used(prompt: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion)
