"""Limits in this process, for use while Redis is unreachable."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace.bus.tenancy.accounts import (
    NEVER,
    NEXT_MONTH,
    TICKS,
    Account,
    AccountUsage,
    Demand,
    LimitDecision,
    Spend,
    drain,
)
from millrace.runtime.clock import Clock
from millrace.schemas.tenants import budgets_of

_MS_PER_S = 1_000
_WAIT_MS = 1_000
_KEEP_MS = 3_600_000

_Refusal = tuple[str, int]


class _AccountState:
    """Usage of one account here since Redis was last reachable."""

    def __init__(self, now_ms: int) -> None:
        self.requests = 0
        self.tokens = 0
        self.requests_taken = 0
        self.tokens_taken = 0
        self.spent_nano = Counter[str]()
        self.held_nano = Counter[str]()
        self.running: set[str] = set()
        self.at_ms = now_ms

    def drain(self, account: Account, now_ms: int) -> None:
        elapsed_ms = now_ms - self.at_ms
        self.requests = drain(self.requests, account.limits.requests_per_minute, elapsed_ms)
        self.tokens = drain(self.tokens, account.limits.tokens_per_minute, elapsed_ms)
        self.at_ms = now_ms

    def refusals(self, account: Account, demand: Demand) -> Iterator[_Refusal]:
        """Yield each limit that refuses, with the ms to wait."""
        limits = account.limits
        buckets = (
            ("requests_per_minute", limits.requests_per_minute, self.requests, demand.num_requests),
            ("tokens_per_minute", limits.tokens_per_minute, self.tokens, demand.num_tokens),
        )
        for name, per_minute, used, wanted in buckets:
            if per_minute is None:
                continue
            over = used + (wanted - per_minute) * TICKS
            if wanted > per_minute:
                yield name, NEVER
            elif over > 0:
                yield name, -(-over // per_minute)
        concurrent = limits.concurrent_requests
        if concurrent is not None and len(self.running) >= concurrent:
            yield "concurrent_requests", _WAIT_MS
        currency = demand.currency
        budget = budgets_of(limits.monthly_budget).get(currency)
        if budget is not None and demand.cost_nano > 0:
            left_nano = budget.scaleb(9) - self.spent_nano[currency] - demand.cost_nano
            if left_nano < 0:
                yield "monthly_budget", NEXT_MONTH
            elif left_nano < self.held_nano[currency]:
                yield "monthly_budget", _WAIT_MS

    def take(self, account: Account, demand: Demand) -> tuple[int, int]:
        """Take a request's usage; return how many requests and tokens ever went into the
        buckets."""
        limits = account.limits
        self.requests += TICKS * demand.num_requests * (limits.requests_per_minute is not None)
        self.tokens += TICKS * demand.num_tokens * (limits.tokens_per_minute is not None)
        self.requests_taken += demand.num_requests
        self.tokens_taken += demand.num_tokens
        self.held_nano[demand.currency] += demand.cost_nano
        self.running.add(demand.request_id)
        return self.requests_taken, self.tokens_taken

    def give_back(self, num_requests: int, num_tokens: int, taken: tuple[int, int]) -> None:
        """Give back what was not used and has not drained.

        A bucket drains in the order in which it was filled, so usage taken after ``taken`` lies
        above it. Negative ``num_tokens``: more were used.
        """
        left = self.requests - (self.requests_taken - taken[0]) * TICKS
        self.requests -= min(max(0, left), num_requests * TICKS)
        if num_tokens < 0:
            self.tokens_taken -= num_tokens
            self.tokens -= num_tokens * TICKS
        else:
            left = self.tokens - (self.tokens_taken - taken[1]) * TICKS
            self.tokens -= min(max(0, left), num_tokens * TICKS)

    def usage(self, currency: str) -> AccountUsage:
        spend = Spend(self.spent_nano[currency], self.held_nano[currency])
        return AccountUsage(self.requests, self.tokens, len(self.running), {currency: spend})


class _Part(NamedTuple):
    """Part of a reservation in one account."""

    account: Account
    state: _AccountState
    taken: tuple[int, int]


class _Reservation:
    def __init__(self, demand: Demand, parts: list[_Part], spent_keys: tuple[str, ...]) -> None:
        self.demand = demand
        self.parts = parts
        self.spent_keys = spent_keys
        self.has_lapsed = False

    def release(self) -> None:
        """Free its place and its share of the budget."""
        if not self.has_lapsed:
            self.has_lapsed = True
            for part in self.parts:
                part.state.running.discard(self.demand.request_id)
                part.state.held_nano[self.demand.currency] -= self.demand.cost_nano


class LocalLimits:
    """Local limits with the rules and sizes of Redis, but for this process alone.

    An account begins with empty buckets and its last known spending. Call ``forget_idle`` once
    Redis is back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[str, _AccountState] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._lapses: list[tuple[int, str]] = []

    def reserve(
        self,
        accounts: Sequence[Account],
        spent_nano: Sequence[int],
        demand: Demand,
        month: str,
    ) -> LimitDecision:
        """Reserve all or nothing, once for a request.

        ``spent_nano`` is the last known spending of each account, in the currency of the demand.
        """
        now_ms = self._now_ms()
        self._release_lapsed(now_ms)
        spent_keys = tuple(account.spent_key(month) for account in accounts)
        states, currency = [], demand.currency
        for key, known_nano in zip(spent_keys, spent_nano, strict=True):
            state = self._states.setdefault(key, _AccountState(now_ms))
            state.spent_nano[currency] = max(state.spent_nano[currency], known_nano)
            states.append(state)
        found: list[tuple[int, Account, str]] = []
        for account, state in zip(accounts, states, strict=True):
            state.drain(account, now_ms)
        usages = tuple(state.usage(currency) for state in states)
        if demand.request_id in self._reservations:
            return LimitDecision(usages=usages)
        for account, state in zip(accounts, states, strict=True):
            found += [(wait_ms, account, name) for name, wait_ms in state.refusals(account, demand)]
        if found:
            wait_ms, account, name = max(found, key=lambda refusal: _rank(refusal[0]))
            return LimitDecision(usages=usages, refused_by=account, limit=name, wait_ms=wait_ms)
        parts = [
            _Part(account, state, state.take(account, demand))
            for account, state in zip(accounts, states, strict=True)
        ]
        self._reservations[demand.request_id] = _Reservation(demand, parts, spent_keys)
        heapq.heappush(self._lapses, (now_ms + demand.lapse_ms, demand.request_id))
        return LimitDecision(usages=tuple(state.usage(currency) for state in states))

    def settle(
        self, request_id: str, num_tokens: int | None, cost_nano: int, currency: str
    ) -> tuple[str, ...]:
        """Give back unused parts; return the Redis keys of the accounts' spending.

        Empty if the request was not granted here.
        """
        made = self._reservations.pop(request_id, None)
        if made is None:
            return ()
        made.release()
        now_ms = self._now_ms()
        for account, state, taken in made.parts:
            state.drain(account, now_ms)
            unused = made.demand.num_tokens - (num_tokens or 0)
            num_requests = made.demand.num_requests if num_tokens is None else 0
            state.give_back(num_requests, unused, taken)
            state.spent_nano[currency] += cost_nano
        return made.spent_keys

    def release(self, request_id: str) -> None:
        """Drop a request whose usage is reported elsewhere. Its tokens count as used."""
        made = self._reservations.pop(request_id, None)
        if made is not None:
            made.release()

    def forget_idle(self) -> None:
        """Forget accounts without running requests, as Redis counts again."""
        if self._states and not self._reservations:
            self._states.clear()
            self._lapses.clear()

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * _MS_PER_S)

    def _release_lapsed(self, now_ms: int) -> None:
        """Release reservations at their deadline, and forget them if they are never settled."""
        while self._lapses and self._lapses[0][0] <= now_ms:
            lapse_ms, request_id = heapq.heappop(self._lapses)
            made = self._reservations.get(request_id)
            if made is None:
                continue
            if made.has_lapsed:
                del self._reservations[request_id]
            else:
                made.release()
                heapq.heappush(self._lapses, (lapse_ms + _KEEP_MS, request_id))


def _rank(wait_ms: int) -> float:
    """Rank a refusal by its wait. The longest one is reported."""
    return float("inf") if wait_ms == NEVER else 1e15 if wait_ms == NEXT_MONTH else wait_ms
