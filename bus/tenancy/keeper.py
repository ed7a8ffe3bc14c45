"""Limits of requests: usage is reserved before a request starts and settled when it ends.

Gateways keep the limits of their callers. Schedulers keep those of tenants whose services publish
jobs themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import msgspec

from millrace.bus import redis_keys
from millrace.bus.tenancy.accounts import (
    Account,
    AccountUsage,
    Demand,
    LimitDecision,
    Spend,
    decision_of,
    key_account,
    month_of,
    read_account_usage,
    tenant_account,
)
from millrace.bus.tenancy.errors import (
    KeyGoneError,
    LimitsUnreachableError,
    check_request_alone,
    rate_limit_error,
)
from millrace.bus.tenancy.local import LocalLimits
from millrace.bus.tenancy.settling import KEEP_MS, Settlement, Settlements, script_time
from millrace.bus.tenancy.tenants import Stored, TenantStore, decode_key, decode_tenant
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script
from millrace.runtime.redis.wire import Argument
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    DEFAULT_CURRENCY,
    LOCAL_TENANT,
    LimitSet,
    TenantRecord,
    TierLimits,
    budgets_of,
    max_waiting_jobs_of,
    to_nano,
    unknown_tenant,
)

_RESERVE = Script(Path(__file__).with_name("reserve.lua").read_text(encoding="utf-8"))

_MS_PER_S = 1_000
_NS_PER_MS = 1_000_000
_MAX_KNOWN = 10_000
_FRESH_S = 5.0


class Holder(Protocol):
    """Owner of a request: its tenant, and its API key (empty: none).

    ``context_tokens`` is the context limit until their records were read.
    """

    @property
    def tenant(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    @property
    def key_id(self) -> str: ...

    @property
    def context_tokens(self) -> int | None: ...


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """Reservation of a request, with its accounts' usage including it.

    ``degraded``: Redis was unreachable, and the limits were this process's own.
    """

    accounts: tuple[Account, ...]
    usages: tuple[AccountUsage, ...]
    degraded: bool = False


class _Known(msgspec.Struct):
    """Last known accounts of a caller in Redis, with their money in a month."""

    accounts: tuple[Account, ...]
    is_revoked: bool = False
    month: str = ""
    money: tuple[dict[str, Spend], ...] = ()

    def note(self, month: str, usages: Sequence[AccountUsage]) -> None:
        """Add the accounts' money in one more currency."""
        if month != self.month:
            self.month, self.money = month, tuple({} for _ in usages)
        for known, usage in zip(self.money, usages, strict=True):
            known.update(usage.money)


class LimitKeeper:
    """Limits of tenants and keys, kept in Redis, and in this process while Redis is unreachable.

    The first settlement of a reservation counts. An unsettled reservation frees its place and its
    share of the budget at its deadline. Without a ``link`` the limits are always this process's
    own. ``num_refusals`` counts refusals by limit, ``num_degraded`` reservations made without
    Redis. Owns ``settlements``. ``close`` ends them. ``redis_time``: buckets and deadlines use
    Redis' clock, which all processes share. ``remembers``: settled reservations may be reserved or
    settled again, which then does nothing.
    """

    def __init__(
        self,
        link: RedisLink | None,
        tiers: TierLimits,
        clock: Clock,
        *,
        redis_time: bool = True,
        remembers: bool = False,
    ) -> None:
        self._link = link
        self._tiers = tiers
        self._remembers = remembers
        self._clock = clock
        self._redis_time = redis_time
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._local = LocalLimits(clock)
        self.settlements = Settlements(link, clock, redis_time=redis_time)
        self._records: dict[str, tuple[float, TenantRecord]] = {}
        self.num_refusals: Counter[str] = Counter()
        self.num_degraded = 0

    async def reserve(self, holder: Holder, demand: Demand) -> Granted:
        """Reserve tokens, money and a place, or nothing at all.

        Raises:
            RateLimitError: A limit is reached.
            TierContextError: The request alone exceeds the context limit.
            KeyGoneError: The key was revoked or deleted.
            LimitsUnreachableError: The request is of the batch tier and Redis is unreachable.
        """
        month = month_of(self._clock.now_ns())
        degraded = False
        try:
            accounts, decision = await self._reserve_in_redis(holder, demand, month)
        except RedisUnreachableError:
            degraded = True
            accounts, decision = self._reserve_here(holder, demand, month)
        except asyncio.CancelledError:
            # It may have been granted all the same.
            self.settle_soon(demand.request_id, None, None)
            raise
        if decision.refused_by is not None:
            self.num_refusals[decision.limit] += 1
            raise rate_limit_error(accounts, decision, demand, self._clock.now_ns())
        return Granted(accounts=accounts, usages=decision.usages, degraded=degraded)

    async def settle(
        self,
        request_id: str,
        usage: Usage | None,
        cost: Decimal | None,
        currency: str = DEFAULT_CURRENCY,
    ) -> bool:
        """Charge a request's usage in ``currency`` and give back the rest of its reservation.

        ``usage`` None: nothing was served, and all is given back.

        Returns:
            True if this call settled it. False if it was settled before, or if Redis is
            unreachable. It is then retried in the background.
        """
        settlement = self._settlement(request_id, usage, cost, currency)
        return await self.settlements.settle(settlement)

    def settle_soon(
        self,
        request_id: str,
        usage: Usage | None,
        cost: Decimal | None,
        currency: str = DEFAULT_CURRENCY,
    ) -> None:
        """Settle like ``settle``, in the background."""
        self.settlements.settle_soon(self._settlement(request_id, usage, cost, currency))

    def settle_here(self, request_id: str) -> None:
        """Free a request's place and budget in this process, as another process settles it in
        Redis.

        Its tokens drain as if all had been used.
        """
        self._local.release(request_id)

    async def usage(self, holder: Holder) -> list[tuple[Account, AccountUsage]]:
        """Return the limits and usage of the holder's tenant and key.

        Raises RedisUnreachableError or KeyGoneError.
        """
        if self._link is None:
            raise RedisUnreachableError
        store = TenantStore(self._link)
        accounts: tuple[Account, ...]
        if holder.key_id:
            found = await store.key(holder.key_id)
            if found is None:
                raise KeyGoneError(holder.key_id, is_revoked=False)
            key, tenant = found
            accounts = (
                tenant_account(holder.tenant, tenant, self._tiers),
                key_account(key, self._tiers),
            )
        else:
            tenant = await store.tenant(holder.tenant)
            accounts = (tenant_account(holder.tenant, tenant, self._tiers),)
        now_ms = None if self._redis_time else self._now_ms()
        month = month_of(self._clock.now_ns())
        usages = await asyncio.gather(
            *(read_account_usage(self._link, account, month, now_ms) for account in accounts)
        )
        return list(zip(accounts, usages, strict=True))

    async def max_waiting_jobs(self, whose: Sequence[tuple[str, Tier]]) -> list[int | None]:
        """Return how many published jobs each tenant may have waiting in a tier; None: no limit.

        A change takes effect within ``_FRESH_S``. While Redis is unreachable, the last known limits
        count.
        """
        stale_s = self._clock.monotonic() - _FRESH_S
        stale = {
            tenant
            for tenant, _ in whose
            if (read := self._records.get(tenant)) is None or read[0] <= stale_s
        }
        if stale:
            await asyncio.gather(*map(self._read_record, stale))
        found: list[int | None] = []
        for tenant, tier in whose:
            read = self._records.get(tenant)
            record = unknown_tenant(tenant) if read is None else read[1]
            found.append(max_waiting_jobs_of(record, self._tiers, tier))
        while len(self._records) > _MAX_KNOWN:
            del self._records[next(iter(self._records))]
        return found

    async def _read_record(self, tenant: str) -> None:
        read = self._records.pop(tenant, None)
        record = unknown_tenant(tenant) if read is None else read[1]
        if self._link is not None:
            with contextlib.suppress(RedisUnreachableError):
                record = (await TenantStore(self._link).tenant(tenant)).record
        self._records[tenant] = (self._clock.monotonic(), record)

    async def close(self, timeout_s: float) -> None:
        """Send pending settlements, for at most ``timeout_s``. The link stays open."""
        await self.settlements.close(timeout_s)

    async def _reserve_in_redis(
        self, holder: Holder, demand: Demand, month: str
    ) -> tuple[tuple[Account, ...], LimitDecision]:
        """Reserve by the script, which runs again if the records have changed."""
        if self._link is None:
            raise RedisUnreachableError
        who = (holder.tenant, holder.key_id)
        while True:
            known = self._known.get(who)
            if known is None:
                accounts = self._accounts_unseen(holder)
            else:
                accounts = known.accounts
                _check(holder, demand, known)
            keys, arguments = self._call(accounts, demand, month)
            answer: list[bytes | int] = await self._link.evaluate(_RESERVE, keys, arguments)
            if answer[0] == b"changed":
                self._learn(holder, [raw for raw in answer[1:] if isinstance(raw, bytes)])
                continue
            decision = decision_of(accounts, answer, demand.currency)
            if known is not None:
                known.note(month, decision.usages)
                self._known.move_to_end(who)
            self._local.forget_idle()
            return accounts, decision

    def _reserve_here(
        self, holder: Holder, demand: Demand, month: str
    ) -> tuple[tuple[Account, ...], LimitDecision]:
        known = self._known.get((holder.tenant, holder.key_id))
        if known is None:
            known = _Known(self._accounts_unseen(holder))
        accounts = known.accounts
        if (
            self._link is not None
            and demand.tier is Tier.BATCH
            and any(account.is_limited for account in accounts)
        ):
            raise LimitsUnreachableError
        _check(holder, demand, known)
        money = known.money if known.month == month else ()
        spent_nano = [of.get(demand.currency, Spend()).spent_nano for of in money]
        self.num_degraded += 1
        return accounts, self._local.reserve(
            accounts, spent_nano or [0] * len(accounts), demand, month
        )

    def _accounts_unseen(self, holder: Holder) -> tuple[Account, ...]:
        """Return the accounts with the limits of the holder's tier, for use before records are
        read."""
        if not holder.key_id:
            limits = LimitSet()
            if holder.tenant != LOCAL_TENANT:
                limits = self._tiers.of(holder.tier)
            return (Account(kind="tenant", name=holder.tenant, limits=limits),)
        limits = msgspec.structs.replace(
            self._tiers.of(holder.tier), context_tokens=holder.context_tokens
        )
        return (
            Account(kind="tenant", name=holder.tenant, limits=limits),
            Account(kind="key", name=holder.key_id, limits=LimitSet()),
        )

    def _learn(self, holder: Holder, records: list[bytes]) -> None:
        """Store records and versions: the tenant's, and the key's if there is one."""
        who = (holder.tenant, holder.key_id)
        tenant = Stored(decode_tenant(holder.tenant, records[0]), records[1])
        known = _Known((tenant_account(holder.tenant, tenant, self._tiers),))
        if holder.key_id:
            if not records[2]:
                self._known.pop(who, None)
                raise KeyGoneError(holder.key_id, is_revoked=False)
            key = Stored(decode_key(records[2]), records[3])
            known.accounts = (*known.accounts, key_account(key, self._tiers))
            known.is_revoked = key.record.revoked_ns is not None
        self._known[who] = known
        self._known.move_to_end(who)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _call(
        self, accounts: tuple[Account, ...], demand: Demand, month: str
    ) -> tuple[list[str], list[Argument]]:
        """Return KEYS and ARGV of the reserving script."""
        keys = [redis_keys.reservation_key(demand.request_id), redis_keys.CURRENCIES_KEY]
        arguments: list[Argument] = [
            script_time(self._clock, redis_time=self._redis_time),
            demand.request_id,
            demand.lapse_ms,
            KEEP_MS,
            demand.num_tokens,
            demand.cost_nano,
            int(demand.in_line),
            redis_keys.currency_suffix(demand.currency),
            demand.num_requests,
        ]
        for account in accounts:
            keys += [account.record_key, *account.state_keys, account.spent_key(month)]
            limits = account.limits
            budget = budgets_of(limits.monthly_budget).get(demand.currency)
            arguments += [
                account.version,
                _or_none(limits.requests_per_minute),
                _or_none(limits.tokens_per_minute),
                _or_none(limits.concurrent_requests),
                _or_none(None if budget is None else to_nano(budget)),
            ]
        return keys, arguments

    def _settlement(
        self, request_id: str, usage: Usage | None, cost: Decimal | None, currency: str
    ) -> Settlement:
        num_tokens = None if usage is None else usage.prompt_tokens + usage.completion_tokens
        cost_nano = 0 if cost is None or usage is None else to_nano(cost)
        return Settlement(
            request_id=request_id,
            num_tokens=num_tokens,
            cost_nano=cost_nano,
            currency=currency,
            since_s=self._clock.monotonic(),
            spent_keys=self._local.settle(request_id, num_tokens, cost_nano, currency),
            remember=self._remembers,
        )

    def _now_ms(self) -> int:
        return self._clock.now_ns() // _NS_PER_MS


def _check(holder: Holder, demand: Demand, known: _Known) -> None:
    if known.is_revoked:
        raise KeyGoneError(holder.key_id, is_revoked=True)
    for account in known.accounts:
        check_request_alone(account, demand)


def _or_none(limit: int | None) -> Argument:
    return "" if limit is None else limit
