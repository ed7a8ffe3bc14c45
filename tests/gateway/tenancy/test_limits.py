"""Limits on a real redis-server, and without one."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest

from millrace.bus.tenancy.errors import (
    ConcurrentRequestsError,
    InsufficientQuotaError,
    RateLimitError,
    RequestsPerMinuteError,
    TierContextError,
    TokensPerMinuteError,
    TooManyTokensError,
)
from millrace.gateway.errors import refusal_of
from millrace.gateway.tenancy.identity import LOCAL, AuthenticationError
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.limit_bench import LimitBench, header, reserve, used
from tests.support.waiting import eventually

# --- each limit ------------------------------------------------------------------------------


async def test_requests_per_minute_come_back_by_and_by(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=2)
    caller = await bench.caller("acme")
    first = await reserve(bench.limiter, caller, "r1")
    assert header(first.headers, "x-ratelimit-limit-requests") == "2"
    assert header(first.headers, "x-ratelimit-remaining-requests") == "1"
    assert header(first.headers, "x-ratelimit-reset-requests") == "30s"
    await reserve(bench.limiter, caller, "r2")
    with pytest.raises(RequestsPerMinuteError, match="tenant acme reached: 2") as refused:
        await reserve(bench.limiter, caller, "r3")
    assert refused.value.retry_after_s == 30.0
    assert refused.value.code == "requests_per_minute"
    assert refused.value.http_status == 429
    assert header(refused.value.headers, "x-ratelimit-remaining-requests") == "0"
    assert bench.limiter.num_refusals == {"requests_per_minute": 1}
    await bench.clock.advance(29.9)
    with pytest.raises(RequestsPerMinuteError):
        await reserve(bench.limiter, caller, "r3")
    await bench.clock.advance(0.1)
    await reserve(bench.limiter, caller, "r3")


async def test_a_later_part_of_a_request_counts_tokens_and_no_request(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=1, tokens_per_minute=250)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    made = await reserve(bench.limiter, caller, "r1-r1", num_requests=0)
    assert header(made.headers, "x-ratelimit-remaining-requests") == "0"
    assert header(made.headers, "x-ratelimit-remaining-tokens") == "50"
    # What was not served gives back what was set aside: tokens, and no request.
    await bench.limiter.settle("r1-r1", None, None)
    with pytest.raises(RequestsPerMinuteError):
        await reserve(bench.limiter, caller, "r2")
    with pytest.raises(TokensPerMinuteError):
        await reserve(bench.limiter, caller, "r1-r2", num_requests=0, completion=240)
    await reserve(bench.limiter, caller, "r1-r3", num_requests=0)


async def test_tokens_that_were_not_used_come_back(bench: LimitBench) -> None:
    await bench.tenant("acme", tokens_per_minute=150)
    caller = await bench.caller("acme")
    made = await reserve(bench.limiter, caller, "r1")
    assert header(made.headers, "x-ratelimit-remaining-tokens") == "50"
    assert header(made.headers, "x-ratelimit-reset-tokens") == "40s"
    with pytest.raises(TokensPerMinuteError) as refused:
        await reserve(bench.limiter, caller, "r2")
    assert refused.value.retry_after_s == 20.0
    assert await bench.limiter.settle("r1", used(10, 20), Decimal(0))
    made = await reserve(bench.limiter, caller, "r2")
    assert header(made.headers, "x-ratelimit-remaining-tokens") == "20"


async def test_more_tokens_at_once_than_the_limit_are_never_taken(bench: LimitBench) -> None:
    await bench.tenant("acme", tokens_per_minute=99)
    caller = await bench.caller("acme")
    with pytest.raises(TooManyTokensError, match="Lower max_tokens") as refused:
        await reserve(bench.limiter, caller, "r1")
    assert (refused.value.code, refused.value.retryable) == ("tokens_per_minute", False)
    assert refused.value.retry_after_s is None
    assert refusal_of(refused.value).should_retry is False


async def test_more_tokens_than_set_aside_are_charged(bench: LimitBench) -> None:
    await bench.tenant("acme", tokens_per_minute=200)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    await bench.limiter.settle("r1", used(100, 290), Decimal(0))
    with pytest.raises(TokensPerMinuteError) as refused:
        await reserve(bench.limiter, caller, "r2")
    assert refused.value.retry_after_s == 87.0  # 290 tokens too many, at 200 a minute
    await bench.clock.advance(87.0)
    await reserve(bench.limiter, caller, "r2")


async def test_concurrent_requests(bench: LimitBench) -> None:
    await bench.tenant("acme", concurrent_requests=2)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1", deadline_s=10)
    await reserve(bench.limiter, caller, "r2", deadline_s=20)
    with pytest.raises(ConcurrentRequestsError) as refused:
        await reserve(bench.limiter, caller, "r3")
    assert refused.value.retry_after_s == 1.0
    await bench.limiter.settle("r2", used(1, 1), Decimal(0))
    await reserve(bench.limiter, caller, "r3", deadline_s=20)
    # r1's gateway died: its place is free again at its deadline.
    with pytest.raises(ConcurrentRequestsError):
        await reserve(bench.limiter, caller, "r4")
    await bench.clock.advance(10.0)
    await reserve(bench.limiter, caller, "r4")


async def test_a_budget_is_held_and_then_spent(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget=Decimal("1.00"))
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1", cost="0.6")
    with pytest.raises(InsufficientQuotaError, match="reserved for running requests") as held:
        await reserve(bench.limiter, caller, "r2", cost="0.6")
    assert held.value.retry_after_s == 1.0
    await bench.limiter.settle("r1", used(10, 10), Decimal("0.400000001"))
    await reserve(bench.limiter, caller, "r2", cost="0.599999999")
    await bench.limiter.settle("r2", used(10, 10), Decimal("0.5"))
    with pytest.raises(InsufficientQuotaError, match=r"0\.900000001 USD is spent") as refused:
        await reserve(bench.limiter, caller, "r3", cost="0.1")
    assert refused.value.code == "insufficient_quota"
    assert refused.value.limit == "monthly_budget"
    assert refused.value.retry_after_s == 10.5 * 86_400
    await reserve(bench.limiter, caller, "free", cost="0")
    await bench.clock.advance(10.5 * 86_400)
    await reserve(bench.limiter, caller, "r3", cost="0.9")


async def test_a_budget_counts_its_own_currency_only(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget={"USD": Decimal(1), "EUR": Decimal(2)})
    caller = await bench.caller("acme", monthly_budget=Decimal(5))
    await reserve(bench.limiter, caller, "u1", cost="0.9")
    await reserve(bench.limiter, caller, "e1", cost="1.5", currency="EUR")
    with pytest.raises(InsufficientQuotaError, match="acme reached: 2 EUR"):
        await reserve(bench.limiter, caller, "e2", cost="0.6", currency="EUR")
    # No account has a budget in francs: nothing bounds them, and they are counted.
    await reserve(bench.limiter, caller, "c1", cost="1000", currency="CHF")
    await bench.limiter.settle("c1", used(1, 1), Decimal(900), "CHF")
    await bench.limiter.settle("e1", used(1, 1), Decimal("1.5"), "EUR")
    with pytest.raises(InsufficientQuotaError, match=r"1\.5 EUR is spent .* cost 0\.6 EUR\."):
        await reserve(bench.limiter, caller, "e2", cost="0.6", currency="EUR")
    [(_, tenant), (_, key)] = await bench.limiter.usage(caller)
    assert tenant.money == {
        "USD": (0, 900_000_000),
        "EUR": (1_500_000_000, 0),
        "CHF": (900_000_000_000, 0),
    }
    assert key.money == tenant.money
    await bench.limiter.settle("u1", used(1, 1), Decimal("0.25"))
    [(_, tenant), _] = await bench.limiter.usage(caller)
    assert tenant.money["USD"] == (250_000_000, 0)


async def test_money_of_another_currency_lapses_too(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget={"EUR": Decimal(1)})
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "e1", cost="1", currency="EUR", deadline_s=30)
    await bench.clock.advance(30.0)
    # Lapsed money returns with the next request in any currency.
    await reserve(bench.limiter, caller, "u1", cost="1")
    [(_, tenant), _] = await bench.limiter.usage(caller)
    assert tenant.money["EUR"] == (0, 0)
    await reserve(bench.limiter, caller, "e2", cost="1", currency="EUR", deadline_s=30)


@pytest.mark.parametrize(
    ("budget", "complaint"),
    [
        ({"euro": Decimal(1)}, "three capital letters"),
        ({"EUR": Decimal(-1)}, "0 and 9000000 EUR"),
        ({}, "must name an amount"),
    ],
)
def test_budgets_that_cannot_be_kept(budget: dict[str, Decimal], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LimitOverrides(monthly_budget=budget)


async def test_what_nobody_settles_lapses(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget=Decimal(1))
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1", cost="1", deadline_s=30)
    await bench.clock.advance(30.0)
    await reserve(bench.limiter, caller, "r2", cost="1", deadline_s=30)
    # Late, but not forgotten.
    await bench.limiter.settle("r1", used(1, 1), Decimal("0.25"))
    await bench.limiter.settle("r2", None, None)
    [(_, tenant), (_, key)] = await bench.limiter.usage(caller)
    assert tenant.spend().spent_nano == key.spend().spent_nano == 250_000_000
    assert tenant.spend().held_nano == tenant.num_running == 0


async def test_a_tiers_window(bench: LimitBench) -> None:
    await bench.tenant("acme", Tier.FREE)
    caller = await bench.caller("acme")
    assert caller.context_tokens == 32_768
    with pytest.raises(TierContextError, match=r"tenant acme \(tier free\) may hold 32768 tokens"):
        await reserve(bench.limiter, caller, "r1", prompt=32_000, completion=769)
    await reserve(bench.limiter, caller, "r1", prompt=32_000, completion=768)
    # Several choices of one request are in contexts of their own.
    with pytest.raises(TierContextError):
        await reserve(bench.limiter, caller, "r2", prompt=40_000, longest=32_769)
    await reserve(bench.limiter, caller, "r2", prompt=40_000, longest=32_768)


async def test_a_keys_own_limits_are_within_its_tenants(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=3)
    narrow = await bench.caller("acme", requests_per_minute=1)
    wide = await bench.caller("acme")
    made = await reserve(bench.limiter, narrow, "n1")
    assert header(made.headers, "x-ratelimit-limit-requests") == "1"
    with pytest.raises(RequestsPerMinuteError, match=f"key {narrow.key_id} reached: 1"):
        await reserve(bench.limiter, narrow, "n2")
    await reserve(bench.limiter, wide, "w1")
    await reserve(bench.limiter, wide, "w2")
    with pytest.raises(RequestsPerMinuteError, match="tenant acme"):
        await reserve(bench.limiter, wide, "w3")


async def test_a_refusal_takes_nothing(bench: LimitBench) -> None:
    await bench.tenant("acme", concurrent_requests=1)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1", cost="0.1")
    before = await bench.limiter.usage(caller)
    for number in range(5):
        with pytest.raises(ConcurrentRequestsError):
            await reserve(bench.limiter, caller, f"x{number}", cost="0.1")
    assert await bench.limiter.usage(caller) == before


# --- once, by anyone -------------------------------------------------------------------------


async def test_any_gateway_settles_and_only_once(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget=Decimal(1))
    caller = await bench.caller("acme")
    other = bench.new_limiter()
    await reserve(bench.limiter, caller, "r1", cost="0.5")
    outcomes = await asyncio.gather(
        *(one.settle("r1", used(5, 5), Decimal("0.1")) for one in (bench.limiter, other) * 3)
    )
    assert sorted(outcomes) == [False] * 5 + [True]
    [(_, tenant), _] = await other.usage(caller)
    assert tenant.spend().spent_nano == 100_000_000
    assert not await other.settle("never made", None, None)


async def test_the_same_reservation_again_takes_nothing_more(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=10)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    again = await reserve(bench.new_limiter(), caller, "r1")
    assert header(again.headers, "x-ratelimit-remaining-requests") == "9"


async def test_nothing_served_gives_all_back(bench: LimitBench) -> None:
    await bench.tenant("acme")
    caller = await bench.caller("acme")
    before = await bench.limiter.usage(caller)
    await reserve(bench.limiter, caller, "r1", cost="3")
    assert await bench.limiter.usage(caller) != before
    await bench.limiter.settle("r1", None, None)
    assert await bench.limiter.usage(caller) == before


async def test_a_client_that_leaves_while_it_waits_holds_nothing(bench: LimitBench) -> None:
    await bench.tenant("acme")
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r0")
    before = await bench.limiter.usage(caller)
    waiting = asyncio.create_task(reserve(bench.limiter, caller, "r1"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    async def is_back() -> bool:
        return await bench.limiter.usage(caller) == before

    await eventually(is_back)


async def test_settling_does_not_keep_anybody_waiting(bench: LimitBench) -> None:
    await bench.tenant("acme", concurrent_requests=100)
    caller = await bench.caller("acme")
    await asyncio.gather(*(reserve(bench.limiter, caller, f"r{i}") for i in range(100)))
    for number in range(100):
        bench.limiter.settle_soon(f"r{number}", used(1, 1), Decimal("0.001"))
    await bench.limiter.close(5.0)
    assert bench.limiter.settlements.num_waiting == bench.limiter.settlements.num_lost == 0
    [(_, tenant), _] = await bench.limiter.usage(caller)
    assert (tenant.num_running, tenant.spend().spent_nano) == (0, 100_000_000)
    left = {key for key in await bench.keys() if key.startswith("resv:")}
    assert not left


# --- records that change ---------------------------------------------------------------------


async def test_changed_limits_hold_at_once(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=1)
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    await bench.tenant("acme", requests_per_minute=2)
    await reserve(bench.limiter, caller, "r2")
    await bench.tenant("acme", Tier.FREE, context_tokens=50)
    with pytest.raises(TierContextError):
        await reserve(bench.limiter, caller, "r3")


async def test_a_key_is_revoked_at_once(bench: LimitBench) -> None:
    await bench.tenant("acme")
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    await bench.store.revoke(caller.key_id, bench.clock.now_ns())
    for number in range(2):
        with pytest.raises(AuthenticationError, match="was revoked"):
            await reserve(bench.limiter, caller, f"x{number}")
    with pytest.raises(AuthenticationError):
        await reserve(bench.new_limiter(), caller, "x2")


async def test_a_key_that_is_gone_opens_nothing(bench: LimitBench) -> None:
    await bench.tenant("acme")
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1")
    await bench.link.call("FLUSHALL")
    with pytest.raises(AuthenticationError, match="not known"):
        await reserve(bench.limiter, caller, "r2")


async def test_the_keyless_tenant_has_limits_only_if_it_is_given_some(bench: LimitBench) -> None:
    made = await reserve(bench.limiter, LOCAL, "r1", completion=10**6)
    assert made.headers == []
    await bench.store.change_tenant(
        "local", lambda _known: TenantRecord(limits=LimitOverrides(requests_per_minute=1))
    )
    await reserve(bench.limiter, LOCAL, "r2", completion=10**6)
    with pytest.raises(RequestsPerMinuteError):
        await reserve(bench.limiter, LOCAL, "r3")


def test_every_refusal_is_an_error_of_its_own() -> None:
    codes = {kind.code for kind in RateLimitError.__subclasses__()}
    assert codes == {
        "requests_per_minute",
        "tokens_per_minute",
        "concurrent_requests",
        "insufficient_quota",
    }
    assert all(issubclass(kind, MillraceError) for kind in RateLimitError.__subclasses__())
