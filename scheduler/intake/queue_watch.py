"""Queue watch: counts waiting jobs, sheds the excess, and reports the queue to the gateways."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from millrace.bus.job_queue import TenantQueue
from millrace.runtime.clock import until_beat_s
from millrace.runtime.tasks import wait_or_sleep
from millrace.scheduler.dispatch.queue_estimate import QueueEstimate
from millrace.scheduler.fleet.autoscaler import Autoscaler, Signals
from millrace.scheduler.intake.served_models import ServedModels
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob, Tenant, TenantQueueCounts
from millrace.scheduler.jobs.terminal_status import TerminalStatus, over_waiting_jobs, shed
from millrace.scheduler.queues.fair_queue import weights_of
from millrace.scheduler.queues.measurements import eta_s, retry_after_s
from millrace.scheduler.stages import end, prepare
from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import ModelQueue, SchedulerState
from millrace.schemas.control import QueueStatus
from millrace.schemas.errors import BusUnavailableError, ModelNotFoundError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.tenants import LOCAL_TENANT

logger = logging.getLogger(__name__)

# Schedulers shed at the same time, so each counts again after this many.
_MAX_SHED_AT_ONCE = 64
# Gateways refuse requests while the queue is at its bound. So it is shed to this fraction below the
# bound, and one tenant's flood does not keep others out.
_SHED_BELOW = 16
# An idle tenant queue is deleted after this time and made again for the next job. Each one costs
# the server about 60 KB and slows all acknowledgements a little.
_FORGET_AFTER_S = 300.0
_MAX_FORGOTTEN_AT_ONCE = 16


# Interval while there is no job. It finds jobs whose announcement was lost, and tells gateways that
# the queue is served.
_REST_S = 2.0
_MAX_REFUSED_AT_ONCE = 64


class QueueWatch:
    """Queue watch: looks every ``status_interval_s``, and at once while there is an excess.

    Without jobs it rests until ``queue_news`` is set, for at most ``_REST_S``.
    """

    def __init__(self, state: SchedulerState, models: ServedModels) -> None:
        self._state = state
        self._models = models
        self._pullers: Mapping[str, JobPuller] = models.pullers
        self._queue_estimates: Mapping[str, QueueEstimate] = models.queue_estimates
        self._weights = weights_of(state.config.tiers)
        self._is_empty = False
        self._autoscalers: dict[str, Autoscaler] = {}

    async def run(self) -> None:
        """Watch the queue until it is cancelled."""
        failing = False
        while True:
            is_too_much = False
            self._state.queue_news.clear()
            if self._state.bus.connected:
                try:
                    is_too_much = await self.look()
                    failing = False
                except BusUnavailableError as error:
                    if not failing:
                        logger.warning(
                            "the queue cannot be counted", extra={"reason": error.message}
                        )
                    failing = True
            interval_s, clock = self._state.config.status_interval_s, self._state.clock
            if not self._is_empty or interval_s >= _REST_S:
                await clock.sleep(0.0 if is_too_much else interval_s)
                continue
            before_s = clock.monotonic()
            await wait_or_sleep(self._state.queue_news, clock, until_beat_s(clock, _REST_S))
            # Never look more often than the interval, however many jobs come.
            await clock.sleep(max(0.0, before_s + interval_s - clock.monotonic()))

    async def look(self) -> bool:
        """Shed the excess and publish the queue status; return whether more is to be shed.

        Raises BusUnavailableError.
        """
        totals: defaultdict[str, dict[TenantQueue, int]] = defaultdict(dict)
        for tenant_queue, count in (await self._state.bus.jobs.tenant_queues()).items():
            totals[tenant_queue.model][tenant_queue] = count
        self._is_empty = not totals
        for model, puller in self._pullers.items():
            puller.counted(totals[model])
        is_too_much = False
        # Models may come and go during an await.
        for model, model_queue in list(self._state.model_queues.items()):
            if self._state.model_queues.get(model) is model_queue:
                is_too_much |= await self._look_at(model, model_queue, totals[model])
        is_too_much |= await self._shed_over_limits()
        await self._forget_idle()
        for tenant_queue in chain.from_iterable(totals.values()):
            if tenant_queue.model not in self._models.known_names:
                await self._refuse_unknown(tenant_queue)
        return is_too_much

    async def _look_at(
        self, model: str, model_queue: ModelQueue, totals: Mapping[TenantQueue, int]
    ) -> bool:
        state, bound = self._state, self._state.config.max_queued_jobs
        waiting: dict[TenantQueue, int] = {}
        num_published = 0
        num_elsewhere = 0  # under names that leave the model, or its version, open
        num_bounded = sum(count for one, count in totals.items() if one.reserved)
        for name, puller in self._pullers.items():
            if self._models.waits_for(puller) is model_queue:
                of_name = puller.backlog.waiting()
                waiting |= of_name
                num_published += puller.backlog.num_published()
                if name != model:
                    num_elsewhere += sum(of_name.values())
                    num_bounded += sum(count for one, count in of_name.items() if one.reserved)
        if self._models.has_versions(model):
            # Jobs under its name may be at workers of other versions, and its own jobs may have
            # come under other names.
            num_here = sum(model_queue.num_here(is_batch=is_batch) for is_batch in (False, True))
            num_queued = sum(waiting.values()) + num_here
        else:
            num_held = state.fleet.num_held(model)
            num_queued = max(0, sum(totals.values()) - num_held) + num_elsewhere
            # Other schedulers hold published jobs that are not counted above.
            num_published = max(num_published, num_queued - num_bounded)
        queue_estimate = self._queue_estimates[model]
        by_tenant: Counter[Tenant] = Counter()
        num_blocked = 0
        for tenant_queue, count in waiting.items():
            if state.lines.is_blocked(tenant_queue):
                num_blocked += count  # they come before no other tenant's jobs
            else:
                by_tenant[Tenant.of(tenant_queue)] += count
        queue_estimate.waiting = by_tenant
        per_s = queue_estimate.per_s()
        num_shed = 0
        num_published = min(num_published, num_queued)
        if num_queued - num_published > bound:
            bounded = {one: count for one, count in waiting.items() if one.reserved}
            num_shed = await self._shed(model, bounded, num_queued - num_published, per_s)
            num_queued -= num_shed
        num_bounded = num_queued - num_published
        queue_estimate.num_queued, queue_estimate.num_published = num_queued, num_published
        queue_estimate.look()
        ttft_ms, tenant_ttft_ms = queue_estimate.ttfts_ms()
        waits_s = queue_estimate.oldest_waits_s()
        oldest_wait_s = max(waits_s.values())
        # More workers would not help jobs that wait for their tenants' limits.
        queue_estimate.num_blocked = num_blocked
        num_sendable = max(0, num_queued - num_blocked)
        signals = Signals(
            num_workers=state.fleet.num_accepting(model),
            num_queued=num_sendable,
            num_held=state.fleet.num_held(model),
            num_slots=state.fleet.num_slots(model),
            kv_share=state.fleet.kv_share(model),
            per_s=per_s,
            wait_s=eta_s(num_sendable, per_s),
            oldest_wait_s=oldest_wait_s,
        )
        await state.bus.control.publish_queue_status(
            QueueStatus(
                model=model,
                num_queued=num_queued,
                bound=bound,
                num_published=num_published,
                retry_after_s=retry_after_s(num_bounded, bound, per_s),
                num_workers=state.fleet.num_workers(model),
                eta_s=eta_s(num_queued, per_s),
                ttft_ms=ttft_ms,
                tenant_ttft_ms=tenant_ttft_ms,
                oldest_wait_s=oldest_wait_s,
                interactive_wait_s=max(
                    wait_s for tier, wait_s in waits_s.items() if tier is not Tier.BATCH
                ),
                desired_workers=self._desired_workers(model, signals),
                sent_ns=state.clock.now_ns(),
            )
        )
        return num_shed > 0 and num_bounded > bound

    def _desired_workers(self, model: str, signals: Signals) -> int:
        """Return the desired number of workers; a rollout's candidate has one before its
        requests."""
        config = self._state.config.autoscale
        autoscaler = self._autoscalers.setdefault(model, Autoscaler(config))
        desired = autoscaler.desired(signals, self._state.clock.monotonic())
        least = 1 if config.is_on and self._models.is_candidate(model) else 0
        return max(desired, least)

    # --- shedding ---

    async def _shed(
        self, model: str, waiting: dict[TenantQueue, int], num_queued: int, per_s: float
    ) -> int:
        """Shed the newest jobs of tenant queues that are longest for their weight; return how
        many."""
        bound = self._state.config.max_queued_jobs
        num_to_shed = min(num_queued - bound + bound // _SHED_BELOW, _MAX_SHED_AT_ONCE)
        num_shed = 0
        while waiting and num_shed < num_to_shed:
            tenant_queue = max(
                waiting,
                key=lambda tenant_queue: waiting[tenant_queue] / self._weights[tenant_queue.tier],
            )
            count = min(num_to_shed - num_shed, waiting[tenant_queue])
            terminal_status = shed(retry_after_s(num_queued, bound, per_s))
            num_jobs = await self._shed_newest(tenant_queue, count, terminal_status)
            num_shed += num_jobs
            waiting[tenant_queue] -= num_jobs
            if not num_jobs or not waiting[tenant_queue]:
                del waiting[tenant_queue]
        logger.info("shed the newest jobs", extra={"model": model, "num_shed": num_shed})
        return num_shed

    async def _shed_newest(
        self, tenant_queue: TenantQueue, count: int, terminal_status: TerminalStatus
    ) -> int:
        jobs = await self._state.bus.jobs.shed_newest(tenant_queue, count)
        for job in jobs:
            answering = self._answer_shed(job, tenant_queue, terminal_status)
            self._state.answers.spawn(answering, f"shed {job.request_id}")
        return len(jobs)

    async def _answer_shed(
        self, job: Job, tenant_queue: TenantQueue, terminal_status: TerminalStatus
    ) -> None:
        if not tenant_queue.reserved and await self._state.is_foreign_reply(job.tenant, job.reply):
            job = replace(job, reply=job.tenant)
        await end.answer_shed(self._state, job, terminal_status)

    async def _shed_over_limits(self) -> bool:
        """Shed each tenant's newest published jobs above its limit; return whether more remain."""
        state = self._state
        if state.admission is None:
            return False
        lines: defaultdict[Tenant, dict[TenantQueue, int]] = defaultdict(dict)
        for puller in self._pullers.values():
            for tenant_queue, count in puller.backlog.waiting_published().items():
                name = tenant_queue.tenant or LOCAL_TENANT
                lines[Tenant(tenant_queue.tier, name)][tenant_queue] = count
        if not lines:
            return False
        bounds = await state.admission.max_waiting_jobs(
            [(tenant.name, tenant.tier) for tenant in lines]
        )
        is_too_much = False
        for (tenant, counts), bound in zip(lines.items(), bounds, strict=True):
            if (
                bound is not None
                and sum(counts.values()) + len(state.lines.held_of(tenant)) > bound
            ):
                is_too_much |= await self._shed_line(tenant, list(counts), bound)
        return is_too_much

    async def _shed_line(
        self, tenant: Tenant, tenant_queues: Sequence[TenantQueue], bound: int
    ) -> bool:
        """Shed a tenant's excess, counted by the queue itself; return whether more remains.

        Other schedulers may hold some of the jobs.
        """
        jobs, waiting = self._state.bus.jobs, dict[TenantQueue, int]()
        for tenant_queue in tenant_queues:
            waiting[tenant_queue] = (await jobs.depth(tenant_queue)).num_queued
        held = self._state.lines.held_of(tenant)
        num_over = sum(waiting.values()) + len(held) - bound
        terminal_status = over_waiting_jobs(tenant.name, tenant.tier, bound)
        num_to_shed = min(num_over, _MAX_SHED_AT_ONCE)
        while num_to_shed > 0 and waiting:
            longest = max(waiting, key=waiting.__getitem__)
            count = min(num_to_shed, waiting.pop(longest))
            num_to_shed -= await self._shed_newest(longest, count, terminal_status)
        for scheduled in held[len(held) - max(num_to_shed, 0) :]:
            if scheduled.phase is JobPhase.HELD:
                end.finish(self._state, scheduled, terminal_status)
        return num_over > _MAX_SHED_AT_ONCE

    async def _forget_idle(self) -> None:
        now_s = self._state.clock.monotonic()
        for puller in list(self._pullers.values()):
            idle = puller.backlog.idle(now_s, _FORGET_AFTER_S)
            for tenant_queue in idle[:_MAX_FORGOTTEN_AT_ONCE]:
                if await self._state.bus.jobs.forget_tenant_queue(tenant_queue):
                    puller.backlog.forget(tenant_queue)
                    self._state.lines.forget(tenant_queue)

    async def _refuse_unknown(self, tenant_queue: TenantQueue) -> None:
        """Refuse jobs of a model that is not in the catalogue. No puller would pull them."""
        state, known = self._state, ", ".join(sorted(self._models.known_names))
        for leased in await state.bus.jobs.pull(tenant_queue, _MAX_REFUSED_AT_ONCE, 0.0):
            error = ModelNotFoundError(
                f"There is no model {leased.job.model!r} here. The models are: {known}."
            )
            scheduled = ScheduledJob.of(leased, TenantQueueCounts(), state.clock.monotonic())
            await prepare.refuse(state, scheduled, error)
        await state.bus.jobs.forget_tenant_queue(tenant_queue)
