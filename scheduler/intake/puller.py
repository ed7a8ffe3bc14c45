"""Pulls jobs when there is capacity for them or too few to choose from."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.running_requests import JobClaim
from millrace.runtime.tasks import Tasks
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.dispatcher import Dispatcher
from millrace.scheduler.intake.preparation import Preparation
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob, Tenant
from millrace.scheduler.queues.backlog import Backlog, Pullable
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import Tier

logger = logging.getLogger(__name__)

_MAX_JOBS_PER_PULL = 64
_MAX_PULLS = 8
_RETRY_S = 0.25
# Who comes next is looked for among all tenant queues, so a window that is nearly full waits for
# this share of its jobs to go, or for the next count.
_REFILL_SHARE = 16
# Pulls that are out before there is a job: each is a request that the queue keeps, made anew every
# few seconds, and for a tenant queue that had a job lately.
_MAX_WAITS = 256
_WAIT_S = 2.5
_WAIT_AFTER_JOB_S = 60.0


class _Limits(NamedTuple):
    """For one tier: how many jobs could be sent at once beside those that are here, and how many
    the window of the tier takes."""

    capacity: int
    window: int


class Puller:
    """Pulls from the tenant queues of one model, those who were served least first, for its
    dispatcher, or for the first of several that its jobs may go to."""

    def __init__(
        self,
        context: SchedulerContext,
        model: str,
        dispatchers: Mapping[str, Dispatcher],
        models: Collection[str],
        preparation: Preparation,
    ) -> None:
        """``dispatchers`` are all that there are, by model; ``models`` those that these jobs may go
        to."""
        self.model = model
        self.backlog = Backlog()
        self._context = context
        self._by_model = dispatchers
        self._dispatchers = [dispatchers[one] for one in models]
        self._preparation = preparation
        self._wake = asyncio.Event()
        self._is_counted = False
        for dispatcher in self._dispatchers:
            dispatcher.wakes.append(self._wake)
        self._pulls = Tasks()
        self._waits = Tasks()
        self._num_asked = dict.fromkeys(Tier, 0)
        self._resting_until_s = float("-inf")
        self._failure: BaseException | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """The one that its jobs wait for while they are in the queue: one that is served, if any
        is."""
        return next((one for one in self._dispatchers if one.is_served), self._dispatchers[0])

    def detach(self) -> None:
        """Nothing wakes it any more."""
        for dispatcher in self._dispatchers:
            dispatcher.wakes.remove(self._wake)

    def published(self, tenant_queue: TenantQueue) -> None:
        """A job has come."""
        if self.backlog.published(tenant_queue):
            self._want(tenant_queue)
            self._wake.set()

    def wake(self) -> None:
        """More jobs may be pulled than a moment ago."""
        self._wake.set()

    def recount(self) -> None:
        """Jobs that others had are in the queue again."""
        self.backlog.doubt_others()
        for tenant_queue in self.backlog.tenant_queues():
            self._want(tenant_queue)
        self._wake.set()

    def counted(self, totals: dict[TenantQueue, int]) -> None:
        """What the queue has of each tenant queue."""
        self.backlog.counted(totals, self._context.clock.monotonic())
        self._is_counted = True
        for tenant_queue in self.backlog.tenant_queues():
            self._want(tenant_queue)
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises what ends a pull but an outage."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._failure is not None:
                    raise self._failure
                self._pull_all()
        finally:
            await self._pulls.close()
            await self._waits.close()

    def _pull_all(self) -> None:
        spare = _MAX_PULLS - len(self._pulls)
        if spare <= 0 or not self._context.bus.connected or self._is_resting():
            return
        if not any(dispatcher.is_served for dispatcher in self._dispatchers):
            return
        least = 0 if self._is_counted else self._context.config.window_jobs // _REFILL_SHARE
        self._is_counted = False
        limits = {tier: self._limits(tier) for tier in Tier}
        queue = self._dispatchers[0].queue
        ranks = {
            tier: (*queue.rank_of(tier), queue.counters(tier))
            for tier in Tier
            if limits[tier].window > 0
            and (limits[tier].capacity > 0 or limits[tier].window >= least)
        }

        def rank(pullable: Pullable) -> tuple[bool, float, float]:
            is_batch, counter, counters = ranks[pullable.tenant_queue.tier]
            return is_batch, counter, counters.counter(pullable.tenant_queue.tenant or "")

        candidates = (
            pullable
            for pullable in self.backlog.to_pull(ranks)
            if self._num_wanted(pullable, limits[pullable.tenant_queue.tier]) > 0
        )
        for pullable in heapq.nsmallest(spare, candidates, rank):
            tenant_queue = pullable.tenant_queue
            num_wanted = self._num_wanted(pullable, self._limits(tenant_queue.tier))
            if num_wanted > 0:
                self._num_asked[tenant_queue.tier] += num_wanted
                self.backlog.pulling(tenant_queue)
                self._context.lines.pulling(tenant_queue, num_wanted)
                pull = self._pulls.spawn(
                    self._pull(tenant_queue, num_wanted), f"pull {tenant_queue}"
                )
                pull.add_done_callback(self._note_failure)

    def _note_failure(self, pull: asyncio.Task[None]) -> None:
        if not pull.cancelled() and (error := pull.exception()) is not None:
            self._failure = error
            self._wake.set()

    def _is_resting(self) -> bool:
        return self._context.clock.monotonic() < self._resting_until_s

    def _limits(self, tier: Tier) -> _Limits:
        is_batch = tier is Tier.BATCH
        num_asked = sum([n for of, n in self._num_asked.items() if (of is Tier.BATCH) is is_batch])
        spare = max([one.spare_capacity(tier) for one in self._dispatchers])
        capacity = max(spare - num_asked, 0)
        num_here = sum([one.queue.num_here(tier) for one in self._dispatchers])
        window = self._context.config.window_jobs + capacity - num_here - self._num_asked[tier]
        return _Limits(capacity, window)

    def _num_wanted(self, pullable: Pullable, limits: _Limits) -> int:
        """How many jobs of a tenant queue to pull now: as many as there is capacity for beside what
        is here already, and a few to choose from, as far as the limits of its tenant admit."""
        per_tenant = self._context.config.window_jobs_per_tenant
        of_tenant = per_tenant + limits.capacity - pullable.num_here
        num_wanted = min(_MAX_JOBS_PER_PULL, limits.window, pullable.num_to_pull, of_tenant)
        if num_wanted <= 0:
            return 0
        return min(num_wanted, self._context.lines.num_wanted(pullable.tenant_queue))

    async def _pull(self, tenant_queue: TenantQueue, num_wanted: int) -> None:
        context = self._context
        pulled: list[LeasedJob] | None = None
        try:
            pulled = await context.bus.jobs.pull(tenant_queue, num_wanted, 0.0)
        except BusUnavailableError as error:
            logger.warning("the queue cannot be read", extra={"reason": error.message})
            self._resting_until_s = context.clock.monotonic() + _RETRY_S
        finally:
            self._num_asked[tenant_queue.tier] -= num_wanted
            context.lines.pulling(tenant_queue, -num_wanted)
            if pulled or (pulled is not None and context.bus.connected):
                self.backlog.pulled(
                    tenant_queue, num_wanted, len(pulled), context.clock.monotonic()
                )
            else:
                self.backlog.pull_failed(tenant_queue)
        self._accept_all(tenant_queue, pulled or [])
        if pulled is not None and len(self._waits) < _MAX_WAITS and self._may_wait(tenant_queue):
            wait = self._waits.spawn(self._wait_for_next(tenant_queue), f"wait for {tenant_queue}")
            wait.add_done_callback(self._note_failure)

    def _may_wait(self, tenant_queue: TenantQueue) -> bool:
        """Nothing of the tenant queue is in the queue, and a job that came now would be sent at
        once."""
        if self.backlog.num_waiting(tenant_queue) or not self._context.bus.connected:
            return False
        if not self._context.lines.num_wanted(tenant_queue):
            return False
        return self._limits(tenant_queue.tier).capacity > 0

    async def _wait_for_next(self, tenant_queue: TenantQueue) -> None:
        """Have a pull out when the next job is stored: it need not be announced and pulled then."""
        context = self._context
        had_job_s = context.clock.monotonic()
        while (
            self._may_wait(tenant_queue)
            and context.clock.monotonic() - had_job_s < _WAIT_AFTER_JOB_S
        ):
            self.backlog.pulling(tenant_queue)
            pulled: list[LeasedJob] | None = None
            try:
                pulled = await context.bus.jobs.pull(tenant_queue, 1, _WAIT_S)
            except BusUnavailableError:
                return  # a pull that somebody needs says so
            finally:
                if pulled or (pulled is not None and context.bus.connected):
                    self.backlog.waited(tenant_queue, len(pulled), context.clock.monotonic())
                else:
                    self.backlog.pull_failed(tenant_queue)
            if pulled:
                had_job_s = context.clock.monotonic()
            self._accept_all(tenant_queue, pulled)

    def _accept_all(self, tenant_queue: TenantQueue, pulled: list[LeasedJob]) -> None:
        for leased in pulled:
            self.accept(leased)
        self._want(tenant_queue)
        self._wake.set()

    def _want(self, tenant_queue: TenantQueue) -> None:
        """Tell the queues who has jobs behind those that are here that could be sent, where the
        tenant queue says so."""
        if tenant_queue.tenant is None:
            return
        has_more = any(
            self.backlog.num_waiting(one) and not self._context.lines.is_blocked(one)
            for one in (tenant_queue, tenant_queue.twin)
        )
        for dispatcher in self._dispatchers:
            dispatcher.queue.want(Tenant.of(tenant_queue), has_more, self.model)

    # --- what was pulled ---

    def accept(self, leased: LeasedJob) -> None:
        """Answer for a delivered job from now on."""
        context = self._context
        scheduled = context.job_table.get(leased.job.request_id)
        if scheduled is None:
            self._accept_new(leased)
            return
        dispatcher = self._by_model[scheduled.job.model]
        if scheduled.lease.stream_sequence != leased.stream_sequence:
            name = f"repeated {scheduled.request_id}"
            context.tasks.spawn(self._accept_repeated(leased, scheduled), name)
            return
        scheduled.renew_lease(leased, context.clock.monotonic())
        if scheduled.phase is Phase.RUNNING:
            dispatcher.continue_where_it_runs(scheduled, scheduled.worker_id)

    async def _accept_repeated(self, leased: LeasedJob, former: ScheduledJob) -> None:
        """The id of a job that is here was published anew."""
        context = self._context
        try:
            if not leased.tenant_queue.reserved and await context.bus.jobs.is_open(
                former.lease.stream_sequence
            ):
                mine = JobClaim.of(leased.job, leased.stream_sequence)
                self._preparation.repeated.answer(leased.job, leased.lease, mine, former.claim)
                return
        except BusUnavailableError as error:
            logger.warning(
                "a repeated job could not be answered; it will be delivered again",
                extra={"reason": error.message},
            )
            return
        self._by_model[former.job.model].runner.complete(former)
        self.accept(leased)

    def _accept_new(self, leased: LeasedJob) -> None:
        self._preparation.start(self._scheduled_job(leased), self._dispatchers[0])

    def _scheduled_job(self, leased: LeasedJob) -> ScheduledJob:
        now_s = self._context.clock.monotonic()
        return ScheduledJob.of(leased, self.backlog.of(leased.tenant_queue), now_s)
