"""Admission of published jobs within their tenants' limits."""

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

# The reservation of a job without a deadline lapses after this time: its place and its share of the
# budget are free again. Usage is charged whenever the job ends.
_LAPSE_S = 3_600.0
_SHORTEST_LAPSE_S = 1.0
_NS_PER_S = 1_000_000_000


# Limits whose places are freed by ends of requests, not by time.
_FREED_BY_ENDS = frozenset({"concurrent_requests", "monthly_budget"})


class NotYet(NamedTuple):
    """Answer that a tenant's limits have no place for a job now.

    Ask again in ``wait_s``, or when a request of the tenant ends if ``ends_free_it``.
    """

    wait_s: float
    ends_free_it: bool


class Places(NamedTuple):
    """Number of further jobs that a tenant's limits admit (None: any number).

    ``is_granted``: the job that asked got a place.
    """

    num_places: int | None
    is_granted: bool


Learn = Callable[[str, Places], None]


def _ignore(_tenant: str, _places: Places) -> None: ...


class _Publisher(msgspec.Struct, frozen=True):
    """Holder of a reservation without an API key. See ``bus.tenancy.keeper.Holder``."""

    tenant: str
    tier: Tier
    key_id: str = ""
    context_tokens: int | None = None


class JobAdmission:
    """Job admission: reserves the possible usage of a job once, across deliveries and schedulers.

    The reservation is settled before the job is acknowledged: by the worker with the actual usage,
    or by the scheduler that ends the job with nothing.
    """

    def __init__(
        self, keeper: LimitKeeper, prices: Callable[[str], PriceBook], clock: Clock
    ) -> None:
        """Create an admission. ``prices`` returns the prices of a loaded model."""
        self._keeper = keeper
        self._prices = prices
        self._clock = clock

    async def admit(
        self, scheduled: ScheduledJob, learn: Learn = _ignore
    ) -> TerminalStatus | NotYet | None:
        """Reserve a prepared job's possible usage.

        Args:
            scheduled: The job.
            learn: Called with the remaining places of the tenant's limits.

        Returns:
            None if the job may run. A terminal status if it never fits or the monthly budget is
            used up. NotYet if it is to ask again. An interrupted job always goes on.
        """
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
        """Return how many published jobs each tenant may have waiting in a tier; None: no limit."""
        return await self._keeper.max_waiting_jobs(whose)

    async def release(self, scheduled: ScheduledJob) -> None:
        """Settle a job that no worker answers, with no charge.

        Returns once Redis knows or is unreachable.
        """
        if scheduled.reservation is not None:
            await self._keeper.settle(scheduled.reservation.reservation_id, None, None)

    def release_local(self, scheduled: ScheduledJob) -> None:
        """Free the place that a job has in this process.

        Places are local while Redis is unreachable.
        """
        if scheduled.reservation is not None and scheduled.is_reserved_here:
            scheduled.is_reserved_here = False
            self._keeper.settle_here(scheduled.reservation.reservation_id)

    async def _reserve(
        self, reservation_id: str, scheduled: ScheduledJob, now_ns: int, learn: Learn
    ) -> bool:
        """Reserve; return whether the reservation is in this process only, as Redis is
        unreachable."""
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
        error.param = "messages"  # a chat's body has its prompt in this field
    if not isinstance(error, RateLimitError):
        return refused(error)
    if not error.comes_back:
        return over_limit(error)
    num_left = num_places(error.accounts[0], error.usages[0])
    learn(job.tenant, Places(num_left, is_granted=False))
    return NotYet(error.retry_after_s or 0.0, error.limit in _FREED_BY_ENDS)
