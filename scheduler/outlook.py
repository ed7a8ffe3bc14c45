"""How long the jobs of one model will wait, and what they are told of it."""

from __future__ import annotations

import logging

from scheduler import placement
from scheduler.entry import Entry
from scheduler.fair_queue import INTERACTIVE, weights_of
from scheduler.lane import Lane
from scheduler.need import Need
from scheduler.parts import Parts
from scheduler.throughput import WINDOW_S, eta_s
from scheduler.verdicts import too_slow
from schemas.config import TierPolicy
from schemas.errors import MillraceError
from schemas.frames import Queued
from schemas.jobs import Tier

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05
# What a job is like that we know nothing of.
_TYPICAL = Need(num_context_tokens=256, num_new_tokens=256)


class Outlook:
    """Predicts from the order of the queue and from how fast it moves. ``num_queued`` jobs waited
    in all when they were last counted."""

    def __init__(self, parts: Parts, lane: Lane) -> None:
        self._parts = parts
        self._lane = lane
        self._weights = weights_of(parts.config.tiers)
        self.num_queued = 0

    async def run(self) -> None:
        """Look soon after a job has to wait. Runs until it is cancelled."""
        news = self._lane.has_waiting
        while True:
            await news.wait()
            news.clear()
            self.look()
            await self._parts.clock.sleep(_LOOK_AGAIN_S)

    def look(self) -> None:
        """Tell those who wait where they stand, and refuse what would come too late for its
        tier."""
        per_s = self._lane.throughput.per_s(self._parts.clock.monotonic())
        is_known = per_s > 0 and self._is_settled()
        # Few ends in a while may be chance, so nobody is refused whom the workers' speed would do.
        best_per_s = max(per_s, self._possible_per_s())
        for position, entry in enumerate(self._lane.queue.in_order()):
            wait_s, least_s = eta_s(position + 1, per_s), eta_s(position + 1, best_per_s)
            if is_known and least_s is not None and self._refuse_if_too_slow(entry, least_s):
                continue
            told = entry.told_position
            if entry.job.reply and (told is None or position <= told // 2 < told):
                entry.told_position = position
                frame = Queued(position=position, eta_s=wait_s)
                self._parts.tasks.spawn(self._tell(entry, frame), f"queued {entry.request_id}")

    def _is_settled(self) -> bool:
        """Whether what ended lately was done by the workers that there are now: without one, or
        when one has just come, say after it died, it tells nothing of what will be."""
        now_s = self._parts.clock.monotonic()
        workers = list(self._parts.fleet.of_model(self._lane.model))
        return bool(workers) and all(now_s - worker.joined_s >= WINDOW_S for worker in workers)

    def _possible_per_s(self) -> float:
        """Requests a second that the workers would end who have measured their steps, with their
        slots full of what they run now."""
        return sum(
            worker.status.max_num_sequences / (worker.mean_output_tokens * worker.decode_step_s)
            for worker in self._parts.fleet.of_model(self._lane.model)
            if worker.mean_output_tokens and worker.decode_step_s
        )

    def _refuse_if_too_slow(self, entry: Entry, wait_s: float) -> bool:
        policy = self._policy(entry.job.tier)
        bound_s = policy.ttft_bound_ms / 1e3
        waited_s = (self._parts.clock.now_ns() - entry.job.received_ns) / 1e9
        if not policy.shed or not bound_s or entry.ran_before or waited_s + wait_s <= bound_s:
            return False
        self._lane.end(entry, too_slow(waited_s + wait_s, bound_s))
        return True

    def _policy(self, tier: Tier) -> TierPolicy:
        policy: TierPolicy = getattr(self._parts.config.tiers, tier.value)
        return policy

    async def _tell(self, entry: Entry, frame: Queued) -> None:
        job = entry.job
        try:
            await self._parts.bus.frames.publish(
                job.reply,
                [(job.request_id, frame)],
                batch=job.batch_frames,
                as_json=job.frames_as_json,
            )
        except MillraceError as error:
            logger.info("a position could not be told", extra={"code": error.code})

    def oldest_wait_s(self) -> float:
        """How long the job that was received first has waited, of those that are here."""
        received_ns = min((entry.job.received_ns for entry in self._lane.queue), default=None)
        return 0.0 if received_ns is None else (self._parts.clock.now_ns() - received_ns) / 1e9

    def oldest_waits_s(self) -> dict[Tier, float]:
        """The same by tier, 0 for one of which none is here."""
        now_ns = self._parts.clock.now_ns()
        received_ns = dict.fromkeys(Tier, now_ns)
        for entry in self._lane.queue:
            tier = entry.job.tier
            received_ns[tier] = min(received_ns[tier], entry.job.received_ns)
        return {tier: (now_ns - since_ns) / 1e9 for tier, since_ns in received_ns.items()}

    def ttft_ms(self) -> dict[Tier, float]:
        """What a job of each tier would wait for its first token if it came now, from a tenant who
        has none waiting; tiers are left out of which nobody can say."""
        workers = list(self._parts.fleet.of_model(self._lane.model))
        if not workers:
            return {}
        served_s = min(placement.predicted_ttft_s(worker, _TYPICAL, 0) for worker in workers)
        per_s = self._lane.throughput.per_s(self._parts.clock.monotonic())
        found: dict[Tier, float] = {}
        for tier in Tier:
            wait_s = eta_s(self._num_ahead(tier), per_s)
            if wait_s is not None:
                found[tier] = (wait_s + served_s) * 1e3
        return found

    def _num_ahead(self, tier: Tier) -> float:
        """Jobs that go before a newcomer: one of each tenant of its tier, and of other tiers as
        many more as they weigh; all of them if it is batch work."""
        queue = self._lane.queue
        if self._parts.fleet.room(self._lane.model, tier) > len(queue):
            return 0
        if tier is Tier.BATCH:
            return len(queue)
        own = queue.num_wanting(tier)
        others = sum(
            min(queue.num_of(other), self._weights[other] / self._weights[tier] * max(own, 1))
            for other in INTERACTIVE
            if other is not tier and queue.num_wanting(other)
        )
        return own + others
