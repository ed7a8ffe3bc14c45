"""Forecast of a model's queue: starts of the waiting jobs and of a new job. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, repeat
from typing import NamedTuple

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ScheduledJob, Tenant
from millrace.scheduler.queues.fair_queue import INTERACTIVE, FairQueue, weights_of
from millrace.scheduler.queues.measurements import JobSize, size_of
from millrace.schemas.config import TierPolicies
from millrace.schemas.jobs import Tier

# Number of jobs simulated one by one. Later ones follow at the mean interval of these.
_MAX_JOBS = 512
_MAX_SLOTS = 1_024
# Stride through the lengths, so that they are in no ascending or descending order.
_SHUFFLE = 5


class Waiting(NamedTuple):
    """Waiting jobs of one tenant.

    ``scheduled_jobs`` are in this scheduler, in their order. ``num_more`` follow on the bus, each
    like ``size``. The tenant sends ``per_s`` such jobs a second.
    """

    scheduled_jobs: list[ScheduledJob]
    num_more: int
    size: JobSize
    per_s: float = 0.0


@dataclass
class Forecast:
    """Predicted waits in seconds from now.

    ``starts_s`` until each job here is in a batch. ``tiers_s`` for a new job of a tenant without
    waiting jobs. ``tenants_s`` for a new job of a tenant with waiting jobs.
    """

    starts_s: dict[ScheduledJob, float] = field(default_factory=dict)
    tiers_s: dict[Tier, float] = field(default_factory=dict)
    tenants_s: dict[Tenant, float] = field(default_factory=dict)


class Slots:
    """Times at which the workers' slots are free. The next job takes the first.

    With very many workers, a sample stands for all, and each of its slots for several.
    """

    def __init__(
        self, workers: Iterable[WorkerView], now_s: float, spread: Sequence[float] = (1.0,)
    ) -> None:
        every = list(workers)
        num_slots = sum(worker.status.max_num_sequences for worker in every)
        self._num_alike = min(max(-(-num_slots // _MAX_SLOTS), 1), len(every))
        self._num_taken = 0
        self._workers = every[:: self._num_alike]
        self._factors = cycle(spread[n * _SHUFFLE % len(spread)] for n in range(len(spread)))
        self._free_s: list[tuple[float, int]] = []
        for number, worker in enumerate(self._workers):
            self._free_s += [(at_s, number) for at_s in worker.slots_free_s(now_s, spread)]
        heapq.heapify(self._free_s)

    def __len__(self) -> int:
        return len(self._free_s)

    @property
    def next_s(self) -> float:
        return self._free_s[0][0]

    def take(self, size: JobSize) -> float:
        """Take the next free slot for a job and return when it starts."""
        at_s, number = self._free_s[0]
        self._num_taken += 1
        if self._num_taken % self._num_alike:
            return at_s
        took_s = self._workers[number].run_s(size.prompt_tokens, size.output_tokens)
        heapq.heapreplace(self._free_s, (at_s + next(self._factors) * took_s, number))
        return at_s


class Forecaster:
    """Simulation of the fair queue that sends all waiting jobs to the slots."""

    def __init__(
        self, queue: FairQueue, waiting: Mapping[Tenant, Waiting], tiers: TierPolicies
    ) -> None:
        self._queue = queue
        self._waiting = waiting
        self._weights = weights_of(tiers)

    def run(self, slots: Slots) -> Forecast:
        """Return the forecast. ``slots`` must not be empty."""
        found = Forecast()
        num_left = _MAX_JOBS
        first_s = slots.next_s
        returning = self._queue.returning()
        for tiers in (INTERACTIVE, (Tier.BATCH,)):
            for scheduled in returning:
                if scheduled.job.tier in tiers:
                    found.starts_s[scheduled] = slots.take(size_of(scheduled))
            num_left = self._send(tiers, slots, found, num_left)
        num_sent = _MAX_JOBS - num_left
        gap_s = (slots.next_s - first_s) / max(num_sent, 1)
        self._guess_the_rest(found, slots.next_s, gap_s)
        return found

    def _send(self, tiers: tuple[Tier, ...], slots: Slots, found: Forecast, num_left: int) -> int:
        """Simulate the queues of some tiers; return how many more jobs may be simulated."""
        lines = [_TierLine(self._queue, tier, self._waiting, self._weights[tier]) for tier in tiers]
        num_turns = [0] * len(lines)
        while num_left and any(line.is_open or line.tier not in found.tiers_s for line in lines):
            now_s = slots.next_s
            for line in lines:
                line.admit(now_s, min([one.counter for one in lines if one.is_wanting], default=0))
            wanting = [number for number, line in enumerate(lines) if line.is_wanting]
            for line in lines:
                if not line.is_wanting:
                    # No job of this tier is ahead of a new one.
                    found.tiers_s.setdefault(line.tier, now_s)
            if not wanting:
                break
            number = min(wanting, key=lambda one: lines[one].counter)
            line = lines[number]
            if num_turns[number]:
                # A new tenant starts level with the least served one, which goes first.
                found.tiers_s.setdefault(line.tier, now_s)
            item = line.next(found.tenants_s, now_s)
            if item is None:
                continue
            scheduled, size = item
            num_turns[number] += 1
            num_left -= 1
            at_s = slots.take(size)
            if scheduled is not None:
                found.starts_s[scheduled] = at_s
        return num_left

    def _guess_the_rest(self, found: Forecast, last_s: float, gap_s: float) -> None:
        """Extrapolate for tenants behind the last simulated job."""
        rest = {tenant: of for tenant, of in self._waiting.items() if tenant not in found.tenants_s}
        num_rest = sum(len(of.scheduled_jobs) + of.num_more for of in rest.values())
        num_behind = max(0, num_rest - _MAX_JOBS)
        for tenant in rest:
            found.tenants_s[tenant] = last_s + gap_s * num_behind
        for tier in Tier:
            found.tiers_s.setdefault(tier, last_s)


class _TierLine:
    """Jobs of one tier in their order, with the tenants taking turns.

    ``is_open``: the start of a new job is still unknown for some tenant.
    """

    def __init__(
        self, queue: FairQueue, tier: Tier, waiting: Mapping[Tenant, Waiting], weight: float
    ) -> None:
        self.tier = tier
        self.counter = queue.floored_counter(tier)
        self._weight = weight
        self._waiting = {tenant: of for tenant, of in waiting.items() if tenant.tier is tier}
        counters = queue.counters(tier)
        self._turns: list[_Turn] = [
            _Turn(counters.floored_counter(tenant.name), number, tenant, _jobs(of), is_now=True)
            for number, (tenant, of) in enumerate(self._waiting.items())
        ]
        heapq.heapify(self._turns)
        self._num_unknown = len(self._turns)
        self._to_come: list[tuple[float, int, _Turn]] = []

    @property
    def is_open(self) -> bool:
        return self._num_unknown > 0

    @property
    def is_wanting(self) -> bool:
        return bool(self._turns)

    def admit(self, now_s: float, least: float) -> None:
        """Add the jobs that have come by ``now_s``.

        Their tenant starts no further ahead than another tenant, their tier no lower than
        ``least``.
        """
        was_wanting = self.is_wanting
        while self._to_come and self._to_come[0][0] <= now_s:
            _, _, turn = heapq.heappop(self._to_come)
            floor = self._turns[0].counter if self._turns else turn.counter
            heapq.heappush(self._turns, turn._replace(counter=max(turn.counter, floor)))
        if self.is_wanting and not was_wanting:
            self.counter = max(self.counter, least)

    def next(
        self, tenants_s: dict[Tenant, float], now_s: float
    ) -> tuple[ScheduledJob | None, JobSize] | None:
        """Return the next job; None if the next tenant has none left, so a new job would start
        now."""
        turn = self._turns[0]
        item = next(turn.jobs, None)
        if item is None:
            heapq.heappop(self._turns)
            if turn.is_now:
                tenants_s[turn.tenant] = now_s
                self._num_unknown -= 1
            self._expect(turn, now_s)
            return None
        tokens = item[1].tokens
        self.counter += tokens / self._weight
        heapq.heapreplace(self._turns, turn._replace(counter=turn.counter + tokens))
        return item

    def _expect(self, turn: _Turn, now_s: float) -> None:
        """Expect further jobs of a tenant whose waiting jobs were all sent."""
        of = self._waiting[turn.tenant]
        if of.per_s <= 0:
            return
        due_s = max(turn.due_s, 0.0) + 1 / of.per_s
        # Jobs that are due by now come together.
        num_due = 1 + max(0, int((now_s - due_s) * of.per_s))
        later = turn._replace(
            jobs=repeat((None, of.size), num_due),
            is_now=False,
            due_s=due_s + (num_due - 1) / of.per_s,
        )
        heapq.heappush(self._to_come, (due_s, turn.number, later))


class _Turn(NamedTuple):
    """Turn of a tenant.

    ``is_now``: with its present jobs, not expected ones. ``due_s`` is the arrival of the last
    expected job.
    """

    counter: float
    number: int
    tenant: Tenant
    jobs: Iterator[tuple[ScheduledJob | None, JobSize]]
    is_now: bool
    due_s: float = 0.0


def _jobs(of: Waiting) -> Iterator[tuple[ScheduledJob | None, JobSize]]:
    here = ((scheduled, size_of(scheduled)) for scheduled in of.scheduled_jobs)
    return chain(here, repeat((None, of.size), of.num_more))
