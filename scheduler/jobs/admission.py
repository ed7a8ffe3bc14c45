"""Admits jobs that no gateway admitted, within what their tenants may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from millrace.bus.redis_keys import job_reservation, spent_key, tenant_account
from millrace.bus.tenancy.accounts import Demand, month_of, num_places
from millrace.bus.tenancy.errors import LimitsUnreachableError, RateLimitError
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.registry.pricing import PriceBook, cost, prices_with
from millrace.runtime.clock import Clock
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, over_limit, refused
from millrace.schemas.control import Reservation
from millrace.schemas.errors import ContextLengthError, MillraceError
from millrace.schemas.jobs import Job, Tier

# What a job without a deadline has set aside frees its place and its share of the budget after this
# time. What it used is charged whenever it ends.
_LAPSE_S = 3_600.0
_SHORTEST_LAPSE_S = 1.0
_NS_PER_S = 1_000_000_000


# Limits whose places come back when requests end, and not by themselves.
_FREED_BY_ENDS = frozenset({"concurrent_requests", "monthly_budget"})


class NotYet(NamedTuple):
    """The limits of a job's tenant have no place for it now: ask again in ``wait_s``, or earlier
    when a request of the tenant ends, if ``ends_free_it``."""

    wait_s: float
    ends_free_it: bool


class Places(NamedTuple):
    """How many more jobs of a tenant its limits admit now (None: any number), after one of them was
    granted its place or not."""

    num_places: int | None
    is_granted: bool


Learn = Callable[[str, Places], None]


def _ignore(_tenant: str, _places: Places) -> None: ...


class _Publisher(msgspec.Struct, frozen=True):
    """See ``bus.tenancy.keeper.Holder``: a tenant's service has no API key."""

    tenant: str
    tier: Tier
    key_id: str = ""
    context_tokens: int | None = None


class JobAdmission:
    """Reserves what jobs may use of their tenants' limits: once for each job, however often it is
    delivered and by whichever scheduler. The reservation is settled before the job is acknowledged:
    by the worker that ends it with what was used, by a scheduler that ends it with nothing."""

    def __init__(
        self, keeper: LimitKeeper, prices: Callable[[str], PriceBook], clock: Clock
    ) -> None:
        """``prices`` of a model that is loaded."""
        self._keeper = keeper
        self._prices = prices
        self._clock = clock

    async def admit(
        self, scheduled: ScheduledJob, learn: Learn = _ignore
    ) -> TerminalStatus | NotYet | None:
        """Return None for a prepared job that may run; else how it ends, because it never fits or
        this month's budget is used up, or when to ask again. A job that was interrupted goes on
        whatever its tenant has used since. ``learn`` gets what the limits have left."""
        if scheduled.lease.tenant_queue.reserved or scheduled.reservation is not None:
            return None
        job = scheduled.job
        reservation_id = job_reservation(scheduled.lease.stream_sequence, job.request_id)
        now_ns = self._clock.now_ns()
        scheduled.reservation = Reservation(
            reservation_id=reservation_id,
            spent_key=spent_key(tenant_account(job.tenant), month_of(now_ns)),
        )
        try:
            is_local = await self._reserve(reservation_id, scheduled, now_ns, learn)
        except MillraceError as error:
            if scheduled.interrupted:
                return None
            # Nothing was set aside.
            scheduled.reservation = None
            return _refusal(job, error, learn)
        scheduled.is_reserved_here = is_local
        if scheduled.is_ended:
            self.release_local(scheduled)
            await self.release(scheduled)
        return None

    async def max_waiting_jobs(self, whose: Sequence[tuple[str, Tier]]) -> list[int | None]:
        """How many jobs that each tenant published in a tier may wait; None: no limit."""
        return await self._keeper.max_waiting_jobs(whose)

    async def release(self, scheduled: ScheduledJob) -> None:
        """No worker answers it: nothing is charged. Returns once Redis knows, or is unreachable."""
        if scheduled.reservation is not None:
            await self._keeper.settle(scheduled.reservation.reservation_id, None, None)

    def release_local(self, scheduled: ScheduledJob) -> None:
        """It is over here: free the place that it had within this process, while Redis was
        unreachable."""
        if scheduled.reservation is not None and scheduled.is_reserved_here:
            scheduled.is_reserved_here = False
            self._keeper.settle_here(scheduled.reservation.reservation_id)

    async def _reserve(
        self, reservation_id: str, scheduled: ScheduledJob, now_ns: int, learn: Learn
    ) -> bool:
        """Whether it was set aside within this process, as Redis is unreachable."""
        job, adapter = scheduled.job, scheduled.adapter
        num_prompt_tokens = len(job.prompt_token_ids or ())
        max_tokens = job.max_completion_tokens
        lapse_s = _LAPSE_S
        if job.deadline_ns is not None:
            lapse_s = max((job.deadline_ns - now_ns) / _NS_PER_S, _SHORTEST_LAPSE_S)
        own = None if adapter is None else adapter.prices
        prices = prices_with(self._prices(job.model), own)
        demand = Demand(
            request_id=reservation_id,
            tier=job.tier,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            cost=cost(prices, num_prompt_tokens, 0, max_tokens),
            currency=prices.currency,
            deadline_s=lapse_s,
            in_line=True,
        )
        granted = await self._keeper.reserve(_Publisher(job.tenant, job.tier), demand)
        num_left = num_places(granted.accounts[0], granted.usages[0])
        learn(job.tenant, Places(num_left, is_granted=True))
        return granted.degraded


def _refusal(job: Job, error: MillraceError, learn: Learn) -> TerminalStatus | NotYet:
    if isinstance(error, LimitsUnreachableError):
        return NotYet(error.retry_after_s, ends_free_it=False)
    if isinstance(error, ContextLengthError) and job.answer is not None:
        error.param = "messages"  # the body of a chat has its prompt there
    if not isinstance(error, RateLimitError):
        return refused(error)
    if not error.comes_back:
        return over_limit(error)
    num_left = num_places(error.accounts[0], error.usages[0])
    learn(job.tenant, Places(num_left, is_granted=False))
    return NotYet(error.retry_after_s or 0.0, error.limit in _FREED_BY_ENDS)
