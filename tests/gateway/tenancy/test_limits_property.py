"""Random reservations on a real Redis and in this process, against an independent observer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from millrace.bus.tenancy.accounts import Demand
from millrace.bus.tenancy.errors import RateLimitError
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tenancy.limits import Limiter
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    LimitOverrides,
    TenantRecord,
    budgets_of,
    from_nano,
    to_nano,
)
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer, free_port

START_NS = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()) * 1_000_000_000
TENANT = LimitOverrides(
    requests_per_minute=6,
    tokens_per_minute=400,
    concurrent_requests=4,
    monthly_budget={"USD": Decimal(2), "EUR": Decimal("1.2")},
)
KEYS = (
    LimitOverrides(requests_per_minute=4, monthly_budget=Decimal("1.5")),
    LimitOverrides(
        concurrent_requests=2, tokens_per_minute=250, monthly_budget={"EUR": Decimal(1)}
    ),
)


class Wanted(NamedTuple):
    """The amount and duration of a request's reservation."""

    key: int
    tokens: int
    cents: int
    currency: str
    lapse_s: int


@dataclass(frozen=True)
class Reserve:
    """Simultaneous reservations, one per entry."""

    requests: list[Wanted]


@dataclass(frozen=True)
class Settle:
    """Settlement of a granted reservation, in shares of it. None: nothing was served."""

    place: int
    share: int | None
    times: int


@dataclass(frozen=True)
class Advance:
    eighths_s: int


REQUEST = st.builds(
    Wanted,
    st.integers(0, 1),
    st.integers(1, 260),
    st.integers(0, 80),
    st.sampled_from(["USD", "EUR", "CHF"]),
    st.sampled_from([5, 30, 600]),
)
STEPS = st.lists(
    st.one_of(
        st.builds(Reserve, st.lists(REQUEST, min_size=1, max_size=4)),
        st.builds(
            Settle,
            st.integers(0, 50),
            st.one_of(st.none(), st.integers(0, 8)),
            st.integers(1, 2),
        ),
        st.builds(Advance, st.integers(1, 400)),
    ),
    max_size=25,
)


@dataclass
class Life:
    """Observed life of a granted request. ``share``: eighths of its reservation that it used."""

    wanted: Wanted
    granted_s: float
    lapses_s: float
    settled: bool = False
    share: int | None = None


@dataclass
class Observer:
    """Observer that knows the limits, but not their implementation."""

    lives: dict[str, Life] = field(default_factory=dict)

    def check(self, now_s: float) -> None:
        self._check_account(list(self.lives.values()), TENANT, now_s)
        for number, limits in enumerate(KEYS):
            of_key = [life for life in self.lives.values() if life.wanted.key == number]
            self._check_account(of_key, limits, now_s)

    def _check_account(self, lives: list[Life], limits: LimitOverrides, now_s: float) -> None:
        if isinstance(limits.concurrent_requests, int):
            running = [life for life in lives if not life.settled and life.lapses_s > now_s]
            assert len(running) <= limits.concurrent_requests
        assert limits.monthly_budget is not UNSET
        for currency, budget in budgets_of(limits.monthly_budget).items():
            settled = [life for life in lives if life.settled and life.wanted.currency == currency]
            nano = sum(spent_nano(life) for life in settled)
            # What lapses unsettled and is settled late may come on top.
            late = sum(life.wanted.cents * 10_000_000 for life in settled if life.lapses_s <= now_s)
            assert nano - late <= to_nano(budget)
        served = [life for life in lives if not (life.settled and life.share is None)]
        for first in served:
            within = [life for life in served if life.granted_s >= first.granted_s]
            minutes = (max(life.granted_s for life in within) - first.granted_s) / 60
            if isinstance(limits.requests_per_minute, int):
                assert len(within) <= limits.requests_per_minute * (1 + minutes) + 1e-9
            if isinstance(limits.tokens_per_minute, int):
                num_tokens = sum(used_tokens(life) for life in within)
                assert num_tokens <= limits.tokens_per_minute * (1 + minutes) + 1e-9


def used_tokens(life: Life) -> int:
    if not life.settled:
        return life.wanted.tokens
    return 0 if life.share is None else life.wanted.tokens * life.share // 8


def spent_nano(life: Life) -> int:
    return 0 if life.share is None else life.wanted.cents * 10_000_000 * life.share // 8


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_limits_hold_and_all_comes_back(redis_server: RedisServer, steps: list[object]) -> None:
    asyncio.run(_live(redis_server.url, steps))


async def _live(url: str, steps: list[object]) -> None:
    clock = ManualClock(START_NS)
    config = GatewayConfig()
    link = RedisLink(RedisConfig(url=url), clock)
    away = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), clock)
    await link.call("FLUSHALL")
    with pytest.raises(RedisUnreachableError):
        await away.call("PING")
    store = TenantStore(link)
    record = TenantRecord(limits=TENANT)
    await store.change_tenant("acme", lambda _known: record)
    callers = []
    for limits in KEYS:
        made, _ = await store.create_key("acme", 0, limits=limits)
        callers.append(Caller(tenant="acme", tier=Tier.PRO, key_id=made.key_id))
    gateways = [Limiter(link, config, clock, redis_time=False) for _ in range(2)]
    alone = Limiter(away, config, clock)
    for caller in callers:
        # So that every limiter has read the records, of which the one alone is told.
        for gateway in gateways:
            await reserve(gateway, caller, "warm", Wanted(0, 1, 0, "USD", 1))
            await gateway.settle("warm", None, None)
    alone._known.update(gateways[0]._known)
    observer = Observer()
    try:
        for number, step in enumerate(steps):
            match step:
                case Advance(eighths_s):
                    await clock.advance(eighths_s / 8)
                case Reserve(requests):
                    wanted = [(f"r{number}.{place}", it) for place, it in enumerate(requests)]
                    granted = await asyncio.gather(
                        *(
                            reserve(gateways[place % 2], callers[one.key], name, one)
                            for place, (name, one) in enumerate(wanted)
                        )
                    )
                    for was_granted, (name, one) in zip(granted, wanted, strict=True):
                        here = await reserve(alone, callers[one.key], name, one)
                        assert here == was_granted
                        if was_granted == "granted":
                            now_s = clock.monotonic()
                            observer.lives[name] = Life(one, now_s, now_s + one.lapse_s)
                case Settle(place, share, times):
                    names = list(observer.lives)
                    if names:
                        name = names[place % len(names)]
                        for _ in range(times):
                            await settle(observer, name, share, [gateways[place % 2], alone])
            observer.check(clock.monotonic())
        for name in observer.lives:
            await settle(observer, name, 4, [gateways[0], alone])
        for number, caller in enumerate(callers):
            [(_, tenant), (_, of_key)] = await gateways[0].usage(caller)
            lives = [life for life in observer.lives.values() if life.wanted.key == number]
            for usage in (tenant, of_key):
                assert usage.num_running == 0
                assert not any(spend.held_nano for spend in usage.money.values())
            for currency in ("USD", "EUR", "CHF"):
                assert tenant.spend(currency).spent_nano == spent_in(
                    observer.lives.values(), currency
                )
                assert of_key.spend(currency).spent_nano == spent_in(lives, currency)
        assert not await link.call("KEYS", "resv:*")
        await clock.advance(600.0)
        [(_, tenant), _] = await gateways[0].usage(callers[0])
        assert tenant.requests == tenant.tokens == 0
    finally:
        for limiter in (*gateways, alone):
            await limiter.close(0.0)
        await link.close()
        await away.close()


def spent_in(lives: Iterable[Life], currency: str) -> int:
    return sum(spent_nano(life) for life in lives if life.wanted.currency == currency)


async def reserve(limiter: Limiter, caller: Caller, name: str, wanted: Wanted) -> str:
    """ "granted", or the limit that refused and the wait."""
    try:
        demand = Demand(
            request_id=name,
            tier=caller.tier,
            max_tokens=wanted.tokens,
            cost=Decimal(wanted.cents).scaleb(-2),
            deadline_s=wanted.lapse_s,
            currency=wanted.currency,
        )
        await limiter.reserve(caller, demand)
    except RateLimitError as error:
        return f"{error.limit} {error.retry_after_s}"
    return "granted"


async def settle(observer: Observer, name: str, share: int | None, limiters: list[Limiter]) -> None:
    life = observer.lives[name]
    settled_before = life.settled
    if not settled_before:
        life.settled, life.share = True, share
    usage = None if share is None else Usage(completion_tokens=life.wanted.tokens * share // 8)
    cost = None if share is None else from_nano(life.wanted.cents * 10_000_000 * share // 8)
    first, *others = limiters
    assert await first.settle(name, usage, cost, life.wanted.currency) is not settled_before
    for other in others:
        await other.settle(name, usage, cost, life.wanted.currency)
