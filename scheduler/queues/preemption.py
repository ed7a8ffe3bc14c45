"""Which jobs may go before one that no worker has capacity for."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.runtime.clock import Clock
from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ScheduledJob
from millrace.scheduler.queues.fair_queue import INTERACTIVE, FairQueue, weights_of
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.jobs import Tier

# Without measurements.
_STEP_S = 0.02
# Maximum idle time used for extrapolation: what runs now may not have run then.
_LONGEST_S = 30.0
# The shortest wait until it is looked again, and the longest, as more may run by then.
_SOONEST_S, _LATEST_S = 0.002, 0.5


@dataclass(slots=True)
class _Running:
    """What the jobs of a tier that run were served since it had a turn, or since a higher one was
    level with it, known up to ``until_s``, and are served each second."""

    until_s: float
    tokens: float = 0.0
    per_s: float = 0.0


class PreemptionPolicy:
    """Bounds by how much a tier may be ahead of one whose next job fits nowhere.

    A worker that is full of a lower tier has capacity for a higher one, whose jobs need not
    wait for a turn of the lower which nobody can give it now. They go first as long as their
    tier was served no more, for its weight, than the lower one will have been after its next
    job, with what its jobs that run are served meanwhile: so in the long run no tier gets more
    of the workers than its weight says while others wait. ``is_timed``: a round is due already
    for jobs that were held back.
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
        """A job of it is about to be charged, for which it was sent by us or by others."""
        self._forget(tier)
        for other in INTERACTIVE[TIER_RANKS[tier] + 1 :]:
            if self._queue.lead(tier, other) <= 0:
                # What the other was served before is no reason to go before it.
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
        """Only tiers above this one can have capacity still; None: any."""
        return self._held_up[-1].job.tier if self._held_up else None

    def hold_up(self, scheduled: ScheduledJob) -> None:
        """No worker has capacity for the first in turn, nor for others of its tier."""
        self._held_up.append(scheduled)

    def may_go(self, scheduled: ScheduledJob) -> bool:
        """Whether it may go before all that are held up."""
        return all(self.may_pass(scheduled, waiting) for waiting in self._held_up)

    def may_pass(self, scheduled: ScheduledJob, waiting: ScheduledJob) -> bool:
        """Whether it may go before another one that waits for capacity."""
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
        """Once a round, since each worker is asked."""
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
        """Return after how many seconds a job that was held back may go, if another round has to
        be timed for it."""
        self._held_up.clear()
        if self._soonest_s is None or self.is_timed:
            return None
        self.is_timed = True
        return min(max(self._soonest_s, _SOONEST_S), _LATEST_S)
