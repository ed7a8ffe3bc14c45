"""Preemption policy: which jobs may go before a job that no worker has capacity for."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.runtime.clock import Clock
from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ScheduledJob
from millrace.scheduler.queues.fair_queue import INTERACTIVE, FairQueue, weights_of
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.jobs import Tier

# Default without measurements.
_STEP_S = 0.02
# Maximum time used for extrapolation: the present runs may not have existed before.
_LONGEST_S = 30.0
# Shortest and longest wait until the next look. More jobs may run by then.
_SOONEST_S, _LATEST_S = 0.002, 0.5


@dataclass(slots=True)
class _Running:
    """Estimated service of a tier's running jobs.

    ``tokens`` counts from the tier's last turn, or from when a higher tier was last level with it,
    until ``until_s``. ``per_s`` is the present rate in tokens per second.
    """

    until_s: float
    tokens: float = 0.0
    per_s: float = 0.0


class PreemptionPolicy:
    """Bound on how far a tier may be ahead of a lower tier whose next job fits nowhere.

    A worker full of a lower tier's jobs still has capacity for a higher tier, which need not wait
    for a turn of the lower tier that cannot be served now. The higher tier goes first while its
    service for its weight is no more than the lower tier's will be after its next job, including
    the service of its running jobs meanwhile. So in the long run no tier gets more than its weight
    while others wait.

    ``is_timed``: a round is already due for jobs that were held back.
    """

    def __init__(
        self, model: str, queue: FairQueue, config: SchedulerConfig, fleet: Fleet, clock: Clock
    ) -> None:
        self._model = model
        self._queue = queue
        self._fleet = fleet
        self._clock = clock
        self._output_weight = config.output_weight
        self._weights = weights_of(config.tiers)
        self._running = {tier: _Running(clock.monotonic()) for tier in Tier}
        self._looked_at: set[Tier] = set()
        self._held_up: list[ScheduledJob] = []
        self._soonest_s: float | None = None
        self.is_timed = False

    def has_turn(self, tier: Tier) -> None:
        """Note that a tier is about to be charged for a job, sent by any scheduler."""
        self._forget(tier)
        for other in INTERACTIVE[TIER_RANKS[tier] + 1 :]:
            if self._queue.lead(tier, other) <= 0:
                # Service that the other tier got before does not count.
                self._forget(other)

    def _forget(self, tier: Tier) -> None:
        self._running[tier] = _Running(self._clock.monotonic())

    # --- one round of sending ---

    def begin_round(self) -> None:
        self._held_up.clear()
        self._looked_at.clear()
        self._soonest_s = None

    @property
    def above(self) -> Tier | None:
        """Only tiers above this one can still have capacity; None: any."""
        return self._held_up[-1].job.tier if self._held_up else None

    def hold_up(self, scheduled: ScheduledJob) -> None:
        """Hold up a tier: no worker has capacity for its next job."""
        self._held_up.append(scheduled)

    def may_go(self, scheduled: ScheduledJob) -> bool:
        """Return whether a job may go before all that are held up."""
        return all(self.may_pass(scheduled, waiting) for waiting in self._held_up)

    def may_pass(self, scheduled: ScheduledJob, waiting: ScheduledJob) -> bool:
        """Return whether a job may go before another job that waits for capacity."""
        tier, other = scheduled.job.tier, waiting.job.tier
        if TIER_RANKS[tier] >= TIER_RANKS[other]:
            return False
        if other is Tier.BATCH:
            return True
        running = self._look_at(other)
        allowed = (waiting.service.tokens + running.tokens) / self._weights[other]
        too_far = self._queue.lead(tier, other) - allowed
        if too_far <= 0:
            return True
        if running.per_s > 0:
            wait_s = too_far * self._weights[other] / running.per_s
            self._soonest_s = min(wait_s, self._soonest_s or wait_s)
        return False

    def _look_at(self, tier: Tier) -> _Running:
        """Update a tier's running service, once a round, as each worker is asked."""
        running = self._running[tier]
        if tier not in self._looked_at:
            self._looked_at.add(tier)
            now_s = self._clock.monotonic()
            running.per_s = self._served_per_s(tier)
            running.tokens += running.per_s * min(now_s - running.until_s, _LONGEST_S)
            running.until_s = now_s
        return running

    def _served_per_s(self, tier: Tier) -> float:
        weight, rank = self._output_weight, TIER_RANKS[tier]
        return sum(
            weight * worker.num_running_of(rank) / (worker.decode_step_s or _STEP_S)
            for worker in self._fleet.of_model(self._model)
        )

    def end_round(self) -> float | None:
        """Return the seconds after which a job that was held back may go.

        None if no further round is needed, or one is due already.
        """
        self._held_up.clear()
        if self._soonest_s is None or self.is_timed:
            return None
        self.is_timed = True
        return min(max(self._soonest_s, _SOONEST_S), _LATEST_S)
