"""What each request may use: set aside before it starts, settled when it ends."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from decimal import Decimal
from pathlib import Path

import msgspec

from bus import redis_keys
from bus.clock import Clock
from bus.redis_link import Argument, RedisAwayError, RedisLink, Script
from bus.tenants import Stored, TenantStore, decode_key, decode_tenant
from gateway.accounts import (
    Account,
    Charge,
    Standing,
    Verdict,
    key_account,
    month_of,
    read_standing,
    tenant_account,
    verdict_of,
)
from gateway.caller import Caller
from gateway.http import Headers
from gateway.identity import revoked_key, unknown_key
from gateway.limit_errors import LimitsAwayError, rate_limit_error, tier_context_error
from gateway.limit_headers import rate_headers
from gateway.local_limits import LocalLimits
from gateway.settling import Settlement, Settler
from schemas.config import GatewayConfig
from schemas.frames import Usage
from schemas.jobs import Tier
from schemas.tenants import LimitSet, to_nano

_RESERVE = Script(Path(__file__).with_name("reserve.lua").read_text(encoding="utf-8"))
_SETTLE = Script(Path(__file__).with_name("settle.lua").read_text(encoding="utf-8"))

_MS_PER_S = 1_000
_NS_PER_MS = 1_000_000
# A reservation can be settled for so long after its deadline.
_KEEP_MS = 3_600_000
_KEEP_MONTH_MS = 400 * 86_400_000
_MAX_KNOWN = 10_000


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What was set aside for a request. ``headers`` tell the client what is left; ``degraded``:
    Redis was away, and the limits were this process's own."""

    request_id: str
    headers: Headers
    degraded: bool = False


class _Known(msgspec.Struct):
    """The accounts of a caller as Redis had them last, and how they stood in which month."""

    accounts: tuple[Account, ...]
    is_revoked: bool = False
    month: str = ""
    standings: tuple[Standing, ...] = ()


class Limiter:
    """Keeps the limits of tenants and keys in Redis, and within the process while it is away.

    Every reservation is settled once, by whichever gateway comes first; one that nobody settles
    frees its place and its share of the budget at its deadline. ``num_refusals`` counts by limit,
    ``num_degraded`` reservations made without Redis. Owns the task that settles; ``close`` ends it.
    ``redis_time``: buckets and deadlines go by Redis' clock, which all gateways share.
    """

    def __init__(
        self,
        link: RedisLink | None,
        config: GatewayConfig,
        clock: Clock,
        *,
        redis_time: bool = True,
    ) -> None:
        self._link = link
        self._tiers = config.tiers
        self._clock = clock
        self._redis_time = redis_time
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._local = LocalLimits(clock)
        self._settler = Settler(self._send, clock)
        self.num_refusals: Counter[str] = Counter()
        self.num_degraded = 0

    @property
    def num_unsettled(self) -> int:
        """How many settlements wait for Redis."""
        return self._settler.num_waiting

    @property
    def num_settlements_lost(self) -> int:
        """How many settlements were given up."""
        return self._settler.num_lost

    async def reserve(
        self,
        caller: Caller,
        request_id: str,
        *,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        cost_upper: Decimal,
        deadline_s: float,
        tier: Tier | None = None,
        longest_tokens: int | None = None,
    ) -> Reservation:
        """Set aside tokens (of all prompts and choices together), money and a place.

        ``longest_tokens`` is what one prompt with one completion may have, if there are several.

        ``deadline_s`` from now the place is free again, settled or not. ``tier`` is the request's
        own, if it is not the caller's. The same ``request_id`` again takes nothing more. Raises
        RateLimitError, TierContextError, AuthenticationError for a key revoked by now, and
        LimitsAwayError for a batch while Redis is away.
        """
        charge = Charge(
            request_id=request_id,
            model=model,
            tier=tier or caller.tier,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            cost_nano=to_nano(cost_upper),
            lapse_ms=max(1, round(deadline_s * _MS_PER_S)),
            longest_tokens=longest_tokens,
        )
        degraded = False
        try:
            accounts, verdict = await self._reserve(caller, charge)
        except RedisAwayError:
            degraded = True
            accounts, verdict = self._reserve_here(caller, charge)
        except asyncio.CancelledError:
            # It may have been granted all the same.
            self.settle_soon(request_id, None, None)
            raise
        if verdict.refused_by is not None:
            self.num_refusals[verdict.limit] += 1
            raise rate_limit_error(accounts, verdict, charge, self._clock.now_ns())
        return Reservation(
            request_id=request_id,
            headers=rate_headers(accounts, verdict.standings),
            degraded=degraded,
        )

    async def settle(self, request_id: str, usage: Usage | None, cost: Decimal | None) -> bool:
        """Charge what a request used and give back the rest; ``usage`` None: nothing was served,
        and all comes back.

        Whether this settled it: not if somebody did before, nor if Redis is away; it is tried again
        in the background then.
        """
        settlement = self._settlement(request_id, usage, cost)
        if self._link is None:
            return False
        try:
            return await self._send(settlement)
        except RedisAwayError:
            self._settler.put(settlement)
            return False

    def settle_soon(self, request_id: str, usage: Usage | None, cost: Decimal | None) -> None:
        """``settle`` without waiting for it."""
        settlement = self._settlement(request_id, usage, cost)
        if self._link is not None:
            self._settler.put(settlement)

    async def standing(self, caller: Caller) -> list[tuple[Account, Standing]]:
        """The limits of the caller's tenant and key and what is used of them. Raises RedisAwayError
        or AuthenticationError."""
        if self._link is None:
            raise RedisAwayError
        store = TenantStore(self._link)
        accounts: tuple[Account, ...]
        if caller.key_id:
            found = await store.key(caller.key_id)
            if found is None:
                raise unknown_key()
            key, tenant = found
            accounts = (
                tenant_account(caller.tenant, tenant, self._tiers),
                key_account(key, self._tiers),
            )
        else:
            tenant = await store.tenant(caller.tenant)
            accounts = (tenant_account(caller.tenant, tenant, self._tiers),)
        now_ms = None if self._redis_time else self._now_ms()
        month = month_of(self._clock.now_ns())
        standings = await asyncio.gather(
            *(read_standing(self._link, account, month, now_ms) for account in accounts)
        )
        return list(zip(accounts, standings, strict=True))

    async def close(self, timeout_s: float) -> None:
        """Send the settlements that wait, for at most ``timeout_s``. The link stays open."""
        await self._settler.close(timeout_s)

    async def _reserve(self, caller: Caller, charge: Charge) -> tuple[tuple[Account, ...], Verdict]:
        """By the script, which is run again if the records have changed since they were seen."""
        if self._link is None:
            raise RedisAwayError
        who = (caller.tenant, caller.key_id)
        month = month_of(self._clock.now_ns())
        while True:
            known = self._known.get(who)
            if known is None:
                accounts = self._accounts_unseen(caller)
            else:
                accounts = known.accounts
                _check(caller, charge, known)
            keys, arguments = self._call(accounts, charge, month)
            answer: list[bytes | int] = await self._link.evaluate(_RESERVE, keys, arguments)
            if answer[0] == b"changed":
                self._learn(caller, [raw for raw in answer[1:] if isinstance(raw, bytes)])
                continue
            verdict = verdict_of(accounts, answer)
            if known is not None:
                known.month, known.standings = month, verdict.standings
                self._known.move_to_end(who)
            self._local.forget_idle()
            return accounts, verdict

    def _reserve_here(self, caller: Caller, charge: Charge) -> tuple[tuple[Account, ...], Verdict]:
        month = month_of(self._clock.now_ns())
        known = self._known.get((caller.tenant, caller.key_id))
        if known is None:
            known = _Known(self._accounts_unseen(caller))
        accounts = known.accounts
        if charge.tier is Tier.BATCH and any(account.is_limited for account in accounts):
            raise LimitsAwayError
        _check(caller, charge, known)
        standings = known.standings if known.month == month else ()
        spent_nano = [standing.spent_nano for standing in standings] or [0] * len(accounts)
        self.num_degraded += 1
        return accounts, self._local.reserve(accounts, spent_nano, charge, month)

    def _accounts_unseen(self, caller: Caller) -> tuple[Account, ...]:
        """What to go by as long as no record was read: the limits of the caller's tier."""
        if not caller.key_id:
            return (Account(kind="tenant", name=caller.tenant, limits=LimitSet()),)
        limits = msgspec.structs.replace(
            self._tiers.of(caller.tier), context_tokens=caller.context_tokens
        )
        return (
            Account(kind="tenant", name=caller.tenant, limits=limits),
            Account(kind="key", name=caller.key_id, limits=LimitSet()),
        )

    def _learn(self, caller: Caller, records: list[bytes]) -> None:
        """Take in records and versions: the tenant's, and the key's if there is one."""
        who = (caller.tenant, caller.key_id)
        tenant = Stored(decode_tenant(caller.tenant, records[0]), records[1])
        known = _Known((tenant_account(caller.tenant, tenant, self._tiers),))
        if caller.key_id:
            if not records[2]:
                self._known.pop(who, None)
                raise unknown_key()
            key = Stored(decode_key(records[2]), records[3])
            known.accounts = (*known.accounts, key_account(key, self._tiers))
            known.is_revoked = key.record.revoked_ns is not None
        self._known[who] = known
        self._known.move_to_end(who)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _call(
        self, accounts: tuple[Account, ...], charge: Charge, month: str
    ) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV of the script that reserves."""
        keys = [redis_keys.reservation_key(charge.request_id)]
        arguments: list[Argument] = [
            self._script_time(),
            charge.request_id,
            charge.lapse_ms,
            _KEEP_MS,
            charge.num_tokens,
            charge.cost_nano,
        ]
        for account in accounts:
            keys += [account.record_key, *account.state_keys, account.spent_key(month)]
            limits = account.limits
            budget = limits.monthly_budget
            arguments += [
                account.version,
                _or_none(limits.requests_per_minute),
                _or_none(limits.tokens_per_minute),
                _or_none(limits.concurrent_requests),
                _or_none(None if budget is None else to_nano(budget)),
            ]
        return keys, arguments

    def _settlement(self, request_id: str, usage: Usage | None, cost: Decimal | None) -> Settlement:
        num_tokens = None if usage is None else usage.prompt_tokens + usage.completion_tokens
        cost_nano = 0 if cost is None or usage is None else to_nano(cost)
        return Settlement(
            request_id=request_id,
            num_tokens=num_tokens,
            cost_nano=cost_nano,
            since_s=self._clock.monotonic(),
            spent_keys=self._local.settle(request_id, num_tokens, cost_nano),
        )

    async def _send(self, settlement: Settlement) -> bool:
        assert self._link is not None, "without Redis nothing is settled there"
        keys = [redis_keys.reservation_key(settlement.request_id), *settlement.spent_keys]
        arguments: list[Argument] = [
            self._script_time(),
            settlement.request_id,
            "" if settlement.num_tokens is None else settlement.num_tokens,
            settlement.cost_nano,
            _KEEP_MS,
            _KEEP_MONTH_MS,
        ]
        return bool(await self._link.evaluate(_SETTLE, keys, arguments))

    def _script_time(self) -> Argument:
        """What scripts are told about the time; empty: they look themselves."""
        return "" if self._redis_time else self._now_ms()

    def _now_ms(self) -> int:
        return self._clock.now_ns() // _NS_PER_MS


def _check(caller: Caller, charge: Charge, known: _Known) -> None:
    if known.is_revoked:
        raise revoked_key(caller.key_id)
    for account in known.accounts:
        bound = account.limits.context_tokens
        if bound is not None and charge.num_context_tokens > bound:
            raise tier_context_error(account, charge)


def _or_none(limit: int | None) -> Argument:
    return "" if limit is None else limit
