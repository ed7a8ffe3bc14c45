"""Pull stage: pulls jobs while workers have capacity, or while too few are here to choose from."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection
from typing import NamedTuple

from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.running_requests import JobClaim
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob, Tenant
from millrace.scheduler.queues.backlog import Backlog, Pullable
from millrace.scheduler.stages import end, place, prepare, repeated
from millrace.scheduler.state import ModelQueue, SchedulerState
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import Tier

logger = logging.getLogger(__name__)

_MAX_JOBS_PER_PULL = 64
_MAX_PULLS = 8
_RETRY_S = 0.25
# A pull looks through all tenant queues. So a window that is nearly full waits until this fraction
# of its jobs has gone, or until the next count.
_REFILL_SHARE = 16
# Pulls that wait for a future job. Each is a request that the queue keeps, renewed every few
# seconds, for a tenant queue that had a job recently.
_MAX_WAITS = 256
_WAIT_S = 2.5
_WAIT_AFTER_JOB_S = 60.0


class _Limits(NamedTuple):
    """Limits of one tier: jobs that could be sent now beyond those here, and room in its window."""

    capacity: int
    window: int


class JobPuller:
    """Puller of one name's jobs. Tenants that were served least come first."""

    def __init__(self, state: SchedulerState, model: str, models: Collection[str]) -> None:
        """Create a puller. ``models`` are the served models for jobs of the name ``model``."""
        self.model = model
        self.backlog = Backlog()
        self._state = state
        self._model_queues = [state.model_queues[one] for one in models]
        self._wake = asyncio.Event()
        self._is_counted = False
        for model_queue in self._model_queues:
            model_queue.wakes.append(self._wake)
        self._pulls = Tasks()
        self._waits = Tasks()
        self._num_asked = dict.fromkeys(Tier, 0)
        self._resting_until_s = float("-inf")
        self._failure: BaseException | None = None

    @property
    def model_queue(self) -> ModelQueue:
        """Queue of a served model of this name if there is one, else of its first model."""
        return next((one for one in self._model_queues if one.is_served), self._model_queues[0])

    def detach(self) -> None:
        """Detach from the model queues, which no longer wake this puller."""
        for model_queue in self._model_queues:
            model_queue.wakes.remove(self._wake)

    def published(self, tenant_queue: TenantQueue) -> None:
        """Note an announced job."""
        if self.backlog.published(tenant_queue):
            self._want(tenant_queue)
            self._wake.set()

    def recount(self) -> None:
        """Recount, as jobs of other schedulers may be in the queue again."""
        self.backlog.doubt_others()
        self._want_all()

    def counted(self, totals: dict[TenantQueue, int]) -> None:
        """Take the number of jobs in each tenant queue."""
        self.backlog.counted(totals, self._state.clock.monotonic())
        self._is_counted = True
        self._want_all()

    def _want_all(self) -> None:
        for tenant_queue in self.backlog.tenant_queues():
            self._want(tenant_queue)
        self._wake.set()

    async def run(self) -> None:
        """Pull until it is cancelled. Raises the error that ends a pull, except an outage."""
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
        is_resting = self._state.clock.monotonic() < self._resting_until_s
        if spare <= 0 or not self._state.bus.connected or is_resting:
            return
        if not any(model_queue.is_served for model_queue in self._model_queues):
            return
        least = 0 if self._is_counted else self._state.config.window_jobs // _REFILL_SHARE
        self._is_counted = False
        limits = {tier: self._limits(tier) for tier in Tier}
        queue = self._model_queues[0].queue
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
                self._state.lines.pulling(tenant_queue, num_wanted)
                pull = self._pulls.spawn(
                    self._pull(tenant_queue, num_wanted), f"pull {tenant_queue}"
                )
                pull.add_done_callback(self._note_failure)

    def _note_failure(self, pull: asyncio.Task[None]) -> None:
        if not pull.cancelled() and (error := pull.exception()) is not None:
            self._failure = error
            self._wake.set()

    def _limits(self, tier: Tier) -> _Limits:
        is_batch = tier is Tier.BATCH
        num_asked = sum([n for of, n in self._num_asked.items() if (of is Tier.BATCH) is is_batch])
        spare = max([one.spare_capacity(tier) for one in self._model_queues])
        capacity = max(spare - num_asked, 0)
        num_here = sum([one.queue.num_here(tier) for one in self._model_queues])
        window = self._state.config.window_jobs + capacity - num_here - self._num_asked[tier]
        return _Limits(capacity, window)

    def _num_wanted(self, pullable: Pullable, limits: _Limits) -> int:
        """Return how many jobs of a tenant queue to pull now.

        That is the free capacity beyond the jobs here, and a few to choose from, within the
        tenant's limits.
        """
        per_tenant = self._state.config.window_jobs_per_tenant
        of_tenant = per_tenant + limits.capacity - pullable.num_here
        num_wanted = min(_MAX_JOBS_PER_PULL, limits.window, pullable.num_to_pull, of_tenant)
        if num_wanted <= 0:
            return 0
        return min(num_wanted, self._state.lines.num_wanted(pullable.tenant_queue, self._wake))

    async def _pull(self, tenant_queue: TenantQueue, num_wanted: int) -> None:
        state = self._state
        pulled: list[LeasedJob] | None = None
        try:
            pulled = await state.bus.jobs.pull(tenant_queue, num_wanted, 0.0)
        except BusUnavailableError as error:
            logger.warning("jobs cannot be pulled", extra={"reason": error.message})
            self._resting_until_s = state.clock.monotonic() + _RETRY_S
        finally:
            self._num_asked[tenant_queue.tier] -= num_wanted
            state.lines.pulling(tenant_queue, -num_wanted)
            if pulled or (pulled is not None and state.bus.connected):
                self.backlog.pulled(tenant_queue, num_wanted, len(pulled), state.clock.monotonic())
            else:
                self.backlog.pull_failed(tenant_queue)
        self._accept_all(tenant_queue, pulled or [])
        if pulled is not None and len(self._waits) < _MAX_WAITS and self._may_wait(tenant_queue):
            wait = self._waits.spawn(self._wait_for_next(tenant_queue), f"wait for {tenant_queue}")
            wait.add_done_callback(self._note_failure)

    def _may_wait(self, tenant_queue: TenantQueue) -> bool:
        """Return whether a pull may wait for the tenant queue's next job.

        It may if the queue is empty and a job that came now would be sent at once.
        """
        if self.backlog.num_waiting(tenant_queue) or not self._state.bus.connected:
            return False
        if not self._state.lines.num_wanted(tenant_queue, self._wake):
            return False
        return self._limits(tenant_queue.tier).capacity > 0

    async def _wait_for_next(self, tenant_queue: TenantQueue) -> None:
        """Keep a pull waiting for the next job, which then needs no announcement or further
        pull."""
        state = self._state
        had_job_s = state.clock.monotonic()
        while (
            self._may_wait(tenant_queue) and state.clock.monotonic() - had_job_s < _WAIT_AFTER_JOB_S
        ):
            self.backlog.pulling(tenant_queue)
            pulled: list[LeasedJob] | None = None
            try:
                pulled = await state.bus.jobs.pull(tenant_queue, 1, _WAIT_S)
            except BusUnavailableError:
                return  # the next pull that finds a job to pull logs the outage
            finally:
                if pulled or (pulled is not None and state.bus.connected):
                    self.backlog.waited(tenant_queue, len(pulled), state.clock.monotonic())
                else:
                    self.backlog.pull_failed(tenant_queue)
            if pulled:
                had_job_s = state.clock.monotonic()
            self._accept_all(tenant_queue, pulled)

    def _accept_all(self, tenant_queue: TenantQueue, pulled: list[LeasedJob]) -> None:
        for leased in pulled:
            self.accept(leased)
        self._want(tenant_queue)
        self._wake.set()

    def _want(self, tenant_queue: TenantQueue) -> None:
        """Tell the fair queues whether the tenant has sendable jobs on the bus."""
        if tenant_queue.tenant is None:
            return
        has_more = any(
            self.backlog.num_waiting(one) and not self._state.lines.is_blocked(one)
            for one in (tenant_queue, tenant_queue.twin)
        )
        for model_queue in self._model_queues:
            model_queue.queue.want(Tenant.of(tenant_queue), has_more, self.model)

    # --- what was pulled ---

    def accept(self, leased: LeasedJob) -> None:
        """Take over a delivered job."""
        state = self._state
        scheduled = state.job_table.get(leased.job.request_id)
        if scheduled is None:
            prepare.start(state, self._scheduled_job(leased))
            return
        if scheduled.lease.stream_sequence != leased.stream_sequence:
            name = f"repeated {scheduled.request_id}"
            state.tasks.spawn(self._accept_repeated(leased, scheduled), name)
            return
        scheduled.renew_lease(leased, state.clock.monotonic())
        if scheduled.phase is JobPhase.RUNNING:
            place.continue_where_it_runs(state, scheduled, scheduled.worker_id)

    async def _accept_repeated(self, leased: LeasedJob, former: ScheduledJob) -> None:
        """Answer a job that repeats the request id of another job in this scheduler."""
        state = self._state
        try:
            if not leased.tenant_queue.reserved and await state.bus.jobs.is_open(
                former.lease.stream_sequence
            ):
                mine = JobClaim.of(leased.job, leased.stream_sequence)
                repeated.answer(state, leased.job, leased.lease, mine, former.claim)
                return
        except BusUnavailableError as error:
            logger.warning(
                "a repeated job could not be answered; it will be delivered again",
                extra={"reason": error.message},
            )
            return
        end.complete(state, former)
        self.accept(leased)

    def _scheduled_job(self, leased: LeasedJob) -> ScheduledJob:
        now_s = self._state.clock.monotonic()
        return ScheduledJob.of(leased, self.backlog.of(leased.tenant_queue), now_s)
