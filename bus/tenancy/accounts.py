"""Accounts of limits: tenants and API keys."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from millrace.bus import redis_keys
from millrace.bus.tenancy.tenants import Stored
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    BUDGET,
    DEFAULT_CURRENCY,
    KEY_LIMITS,
    KeyRecord,
    LimitSet,
    Remaining,
    TenantRecord,
    TierLimits,
    budgets_of,
    from_nano,
    limits_of,
    to_nano,
)

TICKS = 60_000
"""Weight of a request or token in a bucket: the ms of a minute.

A limit of n a minute then drains n ticks each ms.
"""

_MS_PER_S = 1_000
_NS_PER_S = 1_000_000_000
_S_PER_DAY = 86_400
_NS_PER_DAY = _S_PER_DAY * _NS_PER_S
_NOT_LOOKED_UP = b"?"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Tenant or key with its limits, as of the ``version`` of its record."""

    kind: Literal["tenant", "key"]
    name: str
    limits: LimitSet
    version: bytes = _NOT_LOOKED_UP

    @property
    def record_key(self) -> str:
        if self.kind == "tenant":
            return redis_keys.tenant_key(self.name)
        return redis_keys.api_key_key(self.name)

    @property
    def _account(self) -> str:
        if self.kind == "tenant":
            return redis_keys.tenant_account(self.name)
        return redis_keys.api_key_account(self.name)

    @property
    def state_keys(self) -> tuple[str, str, str]:
        """Keys of buckets, running requests and holds."""
        account = self._account
        return (
            redis_keys.buckets_key(account),
            redis_keys.running_key(account),
            redis_keys.holds_key(account),
        )

    def spent_key(self, month: str) -> str:
        return redis_keys.spent_key(self._account, month)

    @property
    def is_limited(self) -> bool:
        return self.limits != LimitSet()


class Spend(NamedTuple):
    """Money in billionths of one currency: spent this month, and the highest cost of running
    requests."""

    spent_nano: int = 0
    held_nano: int = 0


class AccountUsage(NamedTuple):
    """Present usage of an account: ticks in its buckets, running requests, and money by currency.

    After a reservation only the currency of that request is among the money.
    """

    requests: int = 0
    tokens: int = 0
    num_running: int = 0
    money: Mapping[str, Spend] = MappingProxyType({})

    def spend(self, currency: str = DEFAULT_CURRENCY) -> Spend:
        return self.money.get(currency, Spend())


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Highest usage of a request, counted against the limits of its tenant and key."""

    request_id: str
    """The reservation's id. Reserving the same id again takes nothing more."""

    tier: Tier

    deadline_s: float
    """Seconds from now. A reservation that no process settles frees its place then."""

    num_prompt_tokens: int = 0
    """Tokens of all prompts together."""

    max_tokens: int = 0
    """Completion tokens of all choices together."""

    longest_tokens: int | None = None
    """Tokens of the longest prompt with one completion; None: the request has one prompt."""

    cost: Decimal = Decimal(0)
    """Money in ``currency``."""

    currency: str = DEFAULT_CURRENCY

    in_line: bool = False
    """The request is a job that waits for its place, and leaves places to requests that cannot."""

    num_requests: int = 1
    """The number of requests that it counts as: 0 for a later part of a request."""

    @property
    def cost_nano(self) -> int:
        """The cost in billionths of its currency, rounded up."""
        return to_nano(self.cost)

    @property
    def lapse_ms(self) -> int:
        """The deadline in whole milliseconds, 1 at least."""
        return max(1, round(self.deadline_s * _MS_PER_S))

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens that must fit a context."""
        return self.num_tokens if self.longest_tokens is None else self.longest_tokens


NEXT_MONTH = -1
NEVER = -2


class LimitDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision on a reservation: granted, or refused by a limit (see ``LimitSet``) of an account.

    ``wait_ms`` is the time to wait, or NEXT_MONTH or NEVER. ``usages`` are those of all accounts
    after it.
    """

    usages: tuple[AccountUsage, ...]
    refused_by: Account | None = None
    limit: str = ""
    wait_ms: int = 0


def tenant_account(tenant: str, stored: Stored[TenantRecord], tiers: TierLimits) -> Account:
    return Account(
        kind="tenant",
        name=tenant,
        limits=limits_of(stored.record, tiers),
        version=stored.version,
    )


def key_account(stored: Stored[KeyRecord], tiers: TierLimits) -> Account:
    return Account(
        kind="key",
        name=stored.record.key_id,
        limits=limits_of(stored.record, tiers),
        version=stored.version,
    )


def decision_of(
    accounts: Sequence[Account], answer: Sequence[bytes | int], currency: str
) -> LimitDecision:
    """Read the reserving script's answer to a request that costs ``currency``."""
    _, refused, limit, wait_ms, *numbers = answer
    counts = iter(map(int, numbers))
    usages = tuple(
        AccountUsage(requests, tokens, num_running, {currency: Spend(spent, held)})
        for requests, tokens, num_running, spent, held in zip(*[counts] * 5, strict=True)
    )
    assert isinstance(limit, bytes)
    return LimitDecision(
        usages=usages,
        refused_by=accounts[int(refused) - 1] if refused else None,
        limit=limit.decode(),
        wait_ms=int(wait_ms),
    )


async def read_account_usage(
    link: RedisLink, account: Account, month: str, now_ms: int | None = None
) -> AccountUsage:
    """Return the account's usage, with the money of each currency with a budget, spending or holds.

    ``now_ms`` None: use Redis' clock. Raises RedisUnreachableError.
    """
    if now_ms is None:
        seconds, microseconds = await link.call("TIME")
        now_ms = int(seconds) * 1_000 + int(microseconds) // 1_000
    buckets, running, holds = account.state_keys
    others: list[bytes] = await link.call("SMEMBERS", redis_keys.CURRENCIES_KEY)
    budgets = budgets_of(account.limits.monthly_budget)
    currencies = sorted({DEFAULT_CURRENCY, *budgets, *(code.decode() for code in others)})
    suffixes = [redis_keys.currency_suffix(currency) for currency in currencies]
    kept, num_running, held, spent = await asyncio.gather(
        link.call("HMGET", buckets, "at", "requests", "tokens"),
        link.call("ZCOUNT", running, f"({now_ms}", "+inf"),
        link.call("HMGET", holds, *suffixes),
        link.call("MGET", *(account.spent_key(month) + suffix for suffix in suffixes)),
    )
    spends = [Spend(int(of[0] or 0), int(of[1] or 0)) for of in zip(spent, held, strict=True)]
    elapsed_ms = max(0, now_ms - int(kept[0] or now_ms))
    return AccountUsage(
        requests=drain(int(kept[1] or 0), account.limits.requests_per_minute, elapsed_ms),
        tokens=drain(int(kept[2] or 0), account.limits.tokens_per_minute, elapsed_ms),
        num_running=int(num_running),
        money={
            currency: spend
            for currency, spend in zip(currencies, spends, strict=True)
            if currency in budgets or any(spend)
        },
    )


def drain(ticks: int, per_minute: int | None, elapsed_ms: int) -> int:
    """Return the ticks in a bucket after a time; a bucket without a limit is always empty."""
    return 0 if per_minute is None else max(0, ticks - elapsed_ms * per_minute)


def remaining(account: Account, usage: AccountUsage) -> Remaining:
    """Return the remaining limits of an account with this usage."""
    limits = account.limits
    # A limit of one request is never used up.
    left: dict[str, Any] = {name: getattr(limits, name) for name in KEY_LIMITS}
    for name, ticks in (
        ("requests_per_minute", usage.requests),
        ("tokens_per_minute", usage.tokens),
    ):
        if left[name] is not None:
            left[name] = room(left[name], ticks)
    if limits.concurrent_requests is not None:
        left["concurrent_requests"] = max(0, limits.concurrent_requests - usage.num_running)
    left[BUDGET] = {
        currency: max(Decimal(0), budget - from_nano(sum(usage.spend(currency))))
        for currency, budget in budgets_of(limits.monthly_budget).items()
    } or None
    return Remaining(**left)


def room(per_minute: int, ticks: int) -> int:
    """Return how many more requests or tokens fit into a bucket."""
    return max(0, (per_minute * TICKS - ticks) // TICKS)


def num_places(account: Account, usage: AccountUsage) -> int | None:
    """Return how many more requests the account's counts admit, ignoring token limits.

    None: any number.
    """
    limits, places = account.limits, list[int]()
    if limits.concurrent_requests is not None:
        places.append(limits.concurrent_requests - usage.num_running)
    if limits.requests_per_minute is not None:
        places.append(room(limits.requests_per_minute, usage.requests))
    return max(0, min(places)) if places else None


def month_of(now_ns: int) -> str:
    """Return the UTC month, such as 202611."""
    return _month_of_day(now_ns // _NS_PER_DAY)


@functools.lru_cache(maxsize=2)
def _month_of_day(day: int) -> str:
    return f"{datetime.fromtimestamp(day * _S_PER_DAY, UTC):%Y%m}"


def next_month_s(now_ns: int) -> float:
    """Return the seconds until the next UTC month."""
    now = datetime.fromtimestamp(now_ns // _NS_PER_S, UTC)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return (datetime(year, month, 1, tzinfo=UTC) - now).total_seconds()
