"""Admits jobs that no gateway admitted, within what their tenants may use."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import msgspec

from millrace.bus.redis_keys import job_reservation, spent_key, tenant_account
from millrace.bus.tenancy.accounts import month_of
from millrace.bus.tenancy.errors import RateLimitError
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.registry.pricing import PriceBook, cost
from millrace.runtime.clock import Clock
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, over_limit, refused
from millrace.schemas.control import Reservation
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Job, Tier

# What a job without a deadline has set aside frees its place and its share of the budget after this
# time. What it used is charged whenever it ends.
_LAPSE_S = 3_600.0
_SHORTEST_LAPSE_S = 1.0
_NS_PER_S = 1_000_000_000


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

    async def admit(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why a prepared job must not run, if so. One that ran before goes on whatever its tenant
        has used since."""
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
            is_local = await self._reserve(reservation_id, job, now_ns)
        except RateLimitError as error:
            return None if scheduled.ran_before else self._refuse(scheduled, over_limit(error))
        except MillraceError as error:
            return None if scheduled.ran_before else self._refuse(scheduled, refused(error))
        scheduled.is_reserved_here = is_local
        if scheduled.is_ended:
            self.release_local(scheduled)
        return None

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

    async def _reserve(self, reservation_id: str, job: Job, now_ns: int) -> bool:
        """Whether it was set aside within this process, as Redis is unreachable."""
        num_prompt_tokens = len(job.prompt_token_ids or ())
        max_tokens = job.max_completion_tokens
        lapse_s = _LAPSE_S
        if job.deadline_ns is not None:
            lapse_s = max((job.deadline_ns - now_ns) / _NS_PER_S, _SHORTEST_LAPSE_S)
        taken = await self._keeper.take(
            _Publisher(job.tenant, job.tier),
            reservation_id,
            model=job.model,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            cost_upper=self._cost_upper(job.model, num_prompt_tokens, max_tokens),
            deadline_s=lapse_s,
        )
        return taken.degraded

    def _cost_upper(self, model: str, num_prompt_tokens: int, max_tokens: int) -> Decimal:
        return cost(self._prices(model), num_prompt_tokens, 0, max_tokens)

    def _refuse(self, scheduled: ScheduledJob, terminal_status: TerminalStatus) -> TerminalStatus:
        """Nothing was set aside."""
        scheduled.reservation = None
        return terminal_status
