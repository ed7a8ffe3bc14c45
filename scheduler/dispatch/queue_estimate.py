"""Queue estimate of one model: predicted waits, and each job's position."""

from __future__ import annotations

import logging
from collections import Counter

from millrace.registry.routing.router import ModelState
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ResourceRequest, ScheduledJob, Tenant
from millrace.scheduler.jobs.terminal_status import too_slow
from millrace.scheduler.placement import placement
from millrace.scheduler.queues.forecast import Forecast, Forecaster, Slots, Waiting
from millrace.scheduler.queues.measurements import WINDOW_S, JobSize, eta_s, size_of
from millrace.scheduler.stages import end
from millrace.scheduler.state import ModelQueue, SchedulerState
from millrace.schemas.config import TierPolicy
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Queued
from millrace.schemas.jobs import Tier

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05
# Size assumed for a job of an unknown tenant.
_TYPICAL = ResourceRequest(num_context_tokens=256, num_new_tokens=256)
_LONGEST_TOKENS = 1 << 20
# Gateways get the waits of this many tenants, the longest waits first.
_MAX_TENANTS_TOLD = 256


class QueueEstimate:
    """Predicted waits of one model's jobs.

    Predictions come from the order of the queue and the measured speed of the workers. While the
    workers have measured nothing, they come from the rate at which jobs end. ``num_queued`` is the
    last count of all waiting jobs. ``waiting`` counts the jobs still in the queue, by tenant.
    ``num_published`` jobs came from services, and ``max_queued_jobs`` does not bound them.
    ``num_blocked`` jobs wait for their tenants' limits.
    """

    def __init__(self, state: SchedulerState, model_queue: ModelQueue) -> None:
        self._state = state
        self._model_queue = model_queue
        self.num_queued = 0
        self.num_published = 0
        self.num_blocked = 0
        self.waiting: dict[Tenant, int] = {}

    async def run(self) -> None:
        """Look soon after a job has to wait. Runs until it is cancelled."""
        has_waiting = self._model_queue.has_waiting
        while True:
            await has_waiting.wait()
            has_waiting.clear()
            self.look()
            await self._state.clock.sleep(_LOOK_AGAIN_S)

    def look(self) -> None:
        """Publish each waiting job's position, and shed jobs that would exceed their TTFT bound.

        Jobs that are held for their tenants' limits stand behind jobs that may be sent, and have no
        estimate. Published jobs are not shed for a long wait.
        """
        per_s = self._model_queue.throughput.per_s(self._state.clock.monotonic())
        is_known = per_s > 0 and self._is_settled()
        # Few jobs may have ended by chance. So use the workers' possible rate if it is higher.
        best_per_s = max(per_s, self._possible_per_s())
        forecast = self._forecast()
        for position, scheduled in enumerate(self._model_queue.queue.in_order()):
            wait_s, least_s = eta_s(position + 1, per_s), eta_s(position + 1, best_per_s)
            if forecast is not None:
                wait_s = least_s = forecast.starts_s.get(scheduled, wait_s)
            if is_known and least_s is not None and self._refuse_if_too_slow(scheduled, least_s):
                continue
            self._announce(scheduled, position, wait_s)
        num_before = Counter[str]()
        for scheduled in self._state.lines.held():
            if scheduled.job.model == self._model_queue.model:
                tenant = scheduled.job.tenant
                position = len(self._model_queue.queue) + num_before[tenant]
                self._announce(scheduled, position, None)
                num_before[tenant] += 1

    def _announce(self, scheduled: ScheduledJob, position: int, wait_s: float | None) -> None:
        """Publish the position at first, and again each time that it has halved."""
        announced = scheduled.client.announced_position
        if scheduled.job.reply and (announced is None or position <= announced // 2 < announced):
            scheduled.client.announced_position = position
            frame = Queued(position=position, eta_s=wait_s)
            self._state.tasks.spawn(
                self._publish_position(scheduled, frame), f"queued {scheduled.request_id}"
            )

    def _is_settled(self) -> bool:
        """Return whether the rate of ended jobs comes from the workers that are present now.

        It does not without a worker, or soon after one has joined, for example after another died.
        """
        now_s = self._state.clock.monotonic()
        workers = list(self._state.fleet.of_model(self._model_queue.model))
        return bool(workers) and all(now_s - worker.joined_s >= WINDOW_S for worker in workers)

    def _possible_per_s(self) -> float:
        """Return the requests per second that the measured workers end with full slots."""
        return sum(
            worker.status.max_num_sequences / (worker.mean_output_tokens * worker.decode_step_s)
            for worker in self._state.fleet.of_model(self._model_queue.model)
            if worker.mean_output_tokens and worker.decode_step_s
        )

    def _refuse_if_too_slow(self, scheduled: ScheduledJob, wait_s: float) -> bool:
        policy = self._policy(scheduled.job.tier)
        bound_s = policy.ttft_bound_s
        waited_s = (self._state.clock.now_ns() - scheduled.job.received_ns) / 1e9
        if not (policy.shed and scheduled.lease.tenant_queue.reserved) or scheduled.ran_before:
            return False
        if bound_s is None or waited_s + wait_s <= bound_s:
            return False
        end.finish(self._state, scheduled, too_slow(waited_s + wait_s, bound_s))
        return True

    def _policy(self, tier: Tier) -> TierPolicy:
        policy: TierPolicy = getattr(self._state.config.tiers, tier.value)
        return policy

    async def _publish_position(self, scheduled: ScheduledJob, frame: Queued) -> None:
        try:
            await self._state.bus.frames.answer(scheduled.job, frame)
        except MillraceError as error:
            logger.info("a position could not be published", extra={"code": error.code})

    def oldest_waits_s(self) -> dict[Tier, float]:
        """Return the wait of each tier's oldest job here, in seconds; 0 for a tier without jobs."""
        now_ns = self._state.clock.now_ns()
        received_ns = dict.fromkeys(Tier, now_ns)
        for scheduled in self._model_queue.queue:
            tier = scheduled.job.tier
            received_ns[tier] = min(received_ns[tier], scheduled.job.received_ns)
        return {tier: (now_ns - since_ns) / 1e9 for tier, since_ns in received_ns.items()}

    # --- newcomers ---

    def ttfts_ms(self) -> tuple[dict[Tier, float], dict[Tier, dict[str, float]]]:
        """Predict the TTFT of a new job, in milliseconds.

        Returns:
            By tier, for a tenant without waiting jobs. By tier and tenant, where the tenant's
            waiting jobs make it longer. Tiers without a prediction are left out.
        """
        workers = list(self._state.fleet.of_model(self._model_queue.model))
        if not workers:
            return {}, {}
        forecast = self._forecast()
        tiers_ms: dict[Tier, float] = {}
        tenants_ms: dict[Tier, dict[str, float]] = {}
        for tier in Tier:
            wait_s = self._wait_s(tier, forecast)
            if wait_s is None:
                continue
            served_s = self._served_s(tier, workers, is_at_once=not wait_s)
            tiers_ms[tier] = (wait_s + served_s) * 1e3
        if forecast is not None:
            longest = sorted(forecast.tenants_s, key=forecast.tenants_s.__getitem__, reverse=True)
            for tenant in longest[:_MAX_TENANTS_TOLD]:
                served_s = self._served_s(tenant.tier, workers, is_at_once=False)
                ttft_ms = (forecast.tenants_s[tenant] + served_s) * 1e3
                if ttft_ms > tiers_ms[tenant.tier]:
                    tenants_ms.setdefault(tenant.tier, {})[tenant.name] = ttft_ms
        return tiers_ms, tenants_ms

    def model_state(self, tier: Tier, tenant: str) -> ModelState:
        """Return the model's state for a tenant, as the router needs it."""
        fleet, model = self._state.fleet, self._model_queue.model
        tiers_ms, tenants_ms = self.ttfts_ms()
        return ModelState(
            num_workers=fleet.num_accepting(model),
            ttft_ms=tenants_ms.get(tier, {}).get(tenant, tiers_ms.get(tier)),
            is_full=self.num_queued - self.num_published >= self._state.config.max_queued_jobs,
            context_window_tokens=placement.longest_tokens(fleet.of_model(model)),
        )

    def per_s(self) -> float:
        """Return the jobs per second that end while the workers are full; 0 if unknown."""
        per_s = self._model_queue.throughput.per_s(self._state.clock.monotonic())
        return max(per_s, self._possible_per_s())

    def _wait_s(self, tier: Tier, forecast: Forecast | None) -> float | None:
        """Return the seconds until a new job would be in a batch; None if unknown."""
        rank = TIER_RANKS[tier]
        num_before = sum(
            self._model_queue.queue.num_of(one) for one in Tier if TIER_RANKS[one] <= rank
        )
        if self._num_free(rank) > num_before:
            return 0.0
        if forecast is not None:
            return forecast.tiers_s[tier]
        per_s = self._model_queue.throughput.per_s(self._state.clock.monotonic())
        return eta_s(len(self._model_queue.queue) + 1, per_s)

    def _served_s(self, tier: Tier, workers: list[WorkerView], *, is_at_once: bool) -> float:
        """Return the seconds from entering a batch to the first token."""
        resources = _TYPICAL._replace(tier=tier)
        if is_at_once:
            return min(placement.predicted_ttft_s(worker, resources, 0) for worker in workers)
        return min(
            resources.num_context_tokens * worker.prefill_token_s + worker.decode_step_s
            for worker in workers
        )

    def _num_free(self, rank: int) -> int:
        """Return how many slots requests of a rank could have now."""
        workers = self._state.fleet.of_model(self._model_queue.model)
        return sum(
            max(0, worker.status.max_num_sequences - worker.num_ahead(rank)) for worker in workers
        )

    def _forecast(self) -> Forecast | None:
        """Return the forecast, or None if no job waits or the workers have measured nothing."""
        is_any_waiting = len(self._model_queue.queue) or any(self.waiting.values())
        if not is_any_waiting and self._num_free(TIER_RANKS[Tier.BATCH]):
            return None
        workers = [
            worker
            for worker in self._state.fleet.of_model(self._model_queue.model)
            if worker.is_measured and not worker.status.draining
        ]
        if not workers:
            return None
        slots = Slots(
            workers, self._state.clock.monotonic(), self._model_queue.output_lengths.spread()
        )
        forecaster = Forecaster(
            self._model_queue.queue, self._all_waiting(), self._state.config.tiers
        )
        return forecaster.run(slots)

    def _all_waiting(self) -> dict[Tenant, Waiting]:
        """Return the tenants with waiting jobs, and those expected to send jobs meanwhile."""
        here = self._model_queue.queue.by_tenant()
        rates = self._model_queue.arrivals.rates(self._state.clock.monotonic())
        found: dict[Tenant, Waiting] = {}
        for tenant in here.keys() | self.waiting.keys() | rates.keys():
            scheduled_jobs = here.get(tenant, [])
            size = _mean_size(scheduled_jobs) if scheduled_jobs else self._typical_size(tenant)
            num_more = self.waiting.get(tenant, 0)
            found[tenant] = Waiting(scheduled_jobs, num_more, size, rates.get(tenant, 0.0))
        return found

    def _typical_size(self, tenant: Tenant) -> JobSize:
        known = self._model_queue.arrivals.size_of(tenant)
        if known is not None:
            return known
        prompt_tokens = _TYPICAL.num_context_tokens
        expected = self._model_queue.output_lengths.expected_output(tenant.name, _LONGEST_TOKENS)
        weight = self._state.config.output_weight
        return JobSize(prompt_tokens, expected, prompt_tokens + weight * expected)


def _mean_size(scheduled_jobs: list[ScheduledJob]) -> JobSize:
    sizes = [size_of(scheduled) for scheduled in scheduled_jobs]
    return JobSize(*(sum(values) / len(sizes) for values in zip(*sizes, strict=True)))
