"""Fair queue: the order in which a scheduler sends its jobs, by tier, tenant and job."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ScheduledJob, Tenant
from millrace.schemas.config import SchedulerConfig, TierPolicies
from millrace.schemas.jobs import Tier

Key = TypeVar("Key", bound=Hashable)


class LazyMin(Generic[Key]):
    """Mapping whose ``least`` returns the key of the smallest value; of equals, the oldest.

    Setting costs O(log n). Asking costs O(1), plus the changes since the last call.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def set(self, key: Key, value: float) -> None:
        known = self._entries.get(key)
        if known is not None and known[0] == value:
            return
        number = next(self._numbers)
        self._entries[key] = (value, number)
        heapq.heappush(self._heap, (value, number, key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(value, number, key) for key, (value, number) in self._entries.items()]
            heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._entries.pop(key, None)

    def value(self, key: Key) -> float:
        """Return the value of a key. Raises KeyError."""
        return self._entries[key][0]

    def least(self) -> Key | None:
        while self._heap:
            value, number, key = self._heap[0]
            if self._entries.get(key) == (value, number):
                return key
            heapq.heappop(self._heap)
        return None


Member = TypeVar("Member", bound=Hashable)

_MAX_IDLE = 10_000


class VirtualTokens(Generic[Member]):
    """Virtual tokens: a counter of served tokens for each member.

    A member with jobs to serve is active. The active member with the least counter is served next.

    A member that becomes active is lifted to the least counter of the active members, or to the
    last one's if none is active: idle time earns no credit. So the counters of two members that are
    both active all the time differ by no more than the cost of the work that each has in service.
    Counters of up to ``max_idle`` idle members are kept, so a pause clears no debt. A counter never
    falls below the value it was lifted to, even if an earlier charge is refunded.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._active: LazyMin[Member] = LazyMin()
        self._floors: dict[Member, float] = {}
        self._idle: OrderedDict[Member, float] = OrderedDict()
        self._last_stop = 0.0

    def __len__(self) -> int:
        """Return the number of active members."""
        return len(self._active)

    def begin(self, member: Member) -> None:
        """Mark a member as active."""
        if member in self._active:
            return
        least = self._active.least()
        floor = self._last_stop if least is None else self._active.value(least)
        self._floors[member] = floor
        self._active.set(member, max(self._idle.pop(member, floor), floor))

    def end(self, member: Member) -> None:
        """Mark a member as idle."""
        if member not in self._active:
            return
        counter = self._active.value(member)
        self._active.discard(member)
        del self._floors[member]
        if not len(self._active):
            self._last_stop = max(self._last_stop, counter)
        self._set_idle(member, counter)

    def charge(self, member: Member, tokens: float) -> None:
        """Charge tokens to a member; negative tokens are a refund."""
        if member in self._active:
            counter = self._active.value(member) + tokens
            self._active.set(member, max(counter, self._floors[member]))
        else:
            self._set_idle(member, self._idle.pop(member, self._floor()) + tokens)

    def counter(self, member: Member) -> float:
        if member in self._active:
            return self._active.value(member)
        return self._idle.get(member, self._floor())

    def floored_counter(self, member: Member) -> float:
        """Return the counter, lifted as if the member became active now."""
        return max(self.counter(member), self._floor())

    def spread(self) -> float:
        """Return the largest difference between two active members' counters."""
        values = [self._active.value(member) for member in self._active]
        return max(values) - min(values) if values else 0.0

    def _floor(self) -> float:
        least = self._active.least()
        return self._last_stop if least is None else self._active.value(least)

    def _set_idle(self, member: Member, counter: float) -> None:
        self._idle[member] = counter
        self._idle.move_to_end(member)
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)


# Number of other jobs of the tenant that may go before its most urgent one.
MAX_OVERTAKING = 3

_Urgency = tuple[float, int]
_Entry = tuple[tuple[float, ...], int, ScheduledJob]


class _Line:
    """Heap of jobs with lazy removal; passed-over jobs are set aside."""

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.aside: list[_Entry] = []

    def restore(self) -> None:
        for entry in self.aside:
            heapq.heappush(self.heap, entry)
        self.aside.clear()

    def clear(self) -> None:
        self.heap.clear()
        self.aside.clear()


class TenantJobs:
    """Jobs of one tenant in one tier in this scheduler.

    The next job is the most urgent one of those with the lowest ``priority``. At most
    ``MAX_OVERTAKING`` jobs overtake the most urgent job of all. So each job is sent after at most
    ``MAX_OVERTAKING + 1`` times as many of the tenant's jobs as without priorities. O(log n) for
    each change.
    """

    def __init__(self) -> None:
        self._by_priority = _Line()
        self._by_urgency = _Line()
        self._numbers = itertools.count()
        # Heap entries with another number are stale.
        self._members: dict[ScheduledJob, int] = {}
        self._passed: set[ScheduledJob] = set()
        self._num_overtaking = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_ready(self) -> bool:
        """True if a job was not passed over."""
        return len(self._members) > len(self._passed)

    def push(self, scheduled: ScheduledJob, urgency: _Urgency) -> None:
        """Add a job.

        Of two jobs with equal priority, the one with the lower ``urgency`` goes first.
        """
        number = self._members[scheduled] = next(self._numbers)
        by_priority = (scheduled.job.priority, *urgency)
        heapq.heappush(self._by_priority.heap, (by_priority, number, scheduled))
        heapq.heappush(self._by_urgency.heap, (urgency, number, scheduled))

    def remove(self, scheduled: ScheduledJob) -> None:
        """Remove a job that was sent or is over."""
        if scheduled in self._passed:
            self._passed.remove(scheduled)
        elif scheduled is self._first(self._by_urgency):
            self._num_overtaking = 0
        else:
            self._num_overtaking += 1
        del self._members[scheduled]
        if not self._members:
            self._by_priority.clear()
            self._by_urgency.clear()

    def pass_over(self, scheduled: ScheduledJob) -> None:
        """Skip a job until ``restore``. It stays a member."""
        self._passed.add(scheduled)

    def restore(self) -> None:
        """Put passed-over jobs back in their places."""
        self._passed.clear()
        self._by_priority.restore()
        self._by_urgency.restore()

    def head(self) -> ScheduledJob:
        """Return the next job. Raises AssertionError unless ``is_ready``."""
        is_due = self._num_overtaking >= MAX_OVERTAKING
        found = self._first(self._by_urgency if is_due else self._by_priority)
        assert found is not None, "no job is ready"
        return found

    def _first(self, line: _Line) -> ScheduledJob | None:
        while line.heap:
            _, number, scheduled = line.heap[0]
            if self._members.get(scheduled) != number:
                heapq.heappop(line.heap)
            elif scheduled in self._passed:
                line.aside.append(heapq.heappop(line.heap))
            else:
                return scheduled
        return None

    def in_order(self) -> list[ScheduledJob]:
        """Return all jobs in the order of sending if no other job came."""
        by_urgency = self._sorted(self._by_urgency)
        by_priority = self._sorted(self._by_priority)
        if by_priority == by_urgency:
            return by_priority
        left, urgent = deque(by_priority), deque(by_urgency)
        found: dict[ScheduledJob, None] = {}
        num_overtaking = self._num_overtaking
        while len(found) < len(by_urgency):
            for line in (left, urgent):
                while line and line[0] in found:
                    line.popleft()
            chosen = urgent[0] if num_overtaking >= MAX_OVERTAKING else left[0]
            num_overtaking = 0 if chosen is urgent[0] else num_overtaking + 1
            found[chosen] = None
        return list(found)

    def _sorted(self, line: _Line) -> list[ScheduledJob]:
        found = [entry for entry in line.heap if self._members.get(entry[2]) == entry[1]]
        return [scheduled for _, _, scheduled in sorted(found)]


INTERACTIVE = (Tier.ENTERPRISE, Tier.PRO, Tier.FREE)
_NEVER_NS = 2**63


class FairQueue:
    """Pulled jobs of one model, with the tokens served to each tier and tenant.

    Order of sending:

    1. Interrupted jobs, as a client is reading their stream.
    2. The tier that was served least for its weight. The batch tier comes only if no other tier
       has a job here.
    3. In a tier, the tenant that was served least.
    4. Of a tenant, mostly the job with the lowest priority (see ``TenantJobs``), then the job with
       the earliest deadline, or the shortest job.

    ``want`` registers tenants whose jobs are still on the bus.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._weights = weights_of(config.tiers)
        self._shortest = config.order == "shortest"
        self._ageing_s = config.ageing_s
        self._tiers: VirtualTokens[Tier] = VirtualTokens()
        self._tenants: dict[Tier, VirtualTokens[str]] = {tier: VirtualTokens() for tier in Tier}
        self._wanted: dict[Tenant, set[str]] = {}
        self._tenant_jobs: dict[Tenant, TenantJobs] = {}
        self._ready: dict[Tier, LazyMin[str]] = {tier: LazyMin() for tier in Tier}
        self._returning: list[tuple[bool, int, int, ScheduledJob]] = []
        self._numbers = itertools.count()
        # Heap entries with another number are stale.
        self._members: dict[ScheduledJob, int] = {}
        self._queued: set[ScheduledJob] = set()
        self._passed: dict[ScheduledJob, None] = {}
        self._num_of = dict.fromkeys(Tier, 0)
        self._expected: set[ScheduledJob] = set()
        self._num_expected = dict.fromkeys(Tier, 0)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, scheduled: ScheduledJob) -> bool:
        return scheduled in self._members

    def __iter__(self) -> Iterator[ScheduledJob]:
        """Iterate over a snapshot, in no order."""
        return iter(list(self._members))

    # --- which tenants have jobs ---

    def want(self, tenant: Tenant, wants: bool, name: str = "") -> None:
        """Note whether a tenant still has jobs on the bus under one of the model's names."""
        if wants:
            self._wanted.setdefault(tenant, set()).add(name)
            self._begin(tenant)
        elif (names := self._wanted.get(tenant)) is not None:
            names.discard(name)
            if not names:
                del self._wanted[tenant]
                self._end_if_idle(tenant)

    def _begin(self, tenant: Tenant) -> None:
        if tenant not in self._tenant_jobs:
            if tenant.tier is not Tier.BATCH:
                # The batch tier is never charged, so it would always be the least served.
                self._tiers.begin(tenant.tier)
            self._tenants[tenant.tier].begin(tenant.name)
            self._tenant_jobs[tenant] = TenantJobs()

    def _end_if_idle(self, tenant: Tenant) -> None:
        jobs = self._tenant_jobs.get(tenant)
        if jobs is None or len(jobs) or tenant in self._wanted:
            return
        del self._tenant_jobs[tenant]
        self._tenants[tenant.tier].end(tenant.name)
        if not len(self._tenants[tenant.tier]):
            self._tiers.end(tenant.tier)

    # --- in and out ---

    def expect(self, scheduled: ScheduledJob) -> None:
        """Count a job in preparation. ``push`` or ``remove`` follows."""
        self._expected.add(scheduled)
        self._num_expected[scheduled.job.tier] += 1

    def _expect_no_more(self, scheduled: ScheduledJob) -> None:
        if scheduled in self._expected:
            self._expected.remove(scheduled)
            self._num_expected[scheduled.job.tier] -= 1

    def push(self, scheduled: ScheduledJob) -> None:
        self._expect_no_more(scheduled)
        self._members[scheduled] = next(self._numbers)
        tenant = scheduled.tenant
        self._num_of[tenant.tier] += 1
        if scheduled.interrupted:
            self._push_returning(scheduled)
            return
        self._begin(tenant)
        self._queued.add(scheduled)
        self._tenant_jobs[tenant].push(scheduled, self._urgency(scheduled))
        tier, name = tenant
        self._ready[tier].set(name, self._tenants[tier].counter(name))

    def _push_returning(self, scheduled: ScheduledJob) -> None:
        is_batch, number = scheduled.tenant.tier is Tier.BATCH, self._members[scheduled]
        heapq.heappush(
            self._returning, (is_batch, scheduled.lease.stream_sequence, number, scheduled)
        )

    def remove(self, scheduled: ScheduledJob) -> None:
        """Remove a job that was sent or is over."""
        self._expect_no_more(scheduled)
        if self._members.pop(scheduled, None) is None:
            return
        self._passed.pop(scheduled, None)
        self._num_of[scheduled.job.tier] -= 1
        if scheduled not in self._queued:
            return
        self._queued.remove(scheduled)
        tenant = scheduled.tenant
        jobs = self._tenant_jobs[tenant]
        jobs.remove(scheduled)
        if not jobs.is_ready:
            self._ready[tenant.tier].discard(tenant.name)
            self._end_if_idle(tenant)

    def pass_over(self, scheduled: ScheduledJob) -> None:
        """Skip the head, which cannot be sent now, until ``restore_passed``. It stays a member."""
        self._passed[scheduled] = None
        if scheduled not in self._queued:
            self._returning = [item for item in self._returning if item[3] is not scheduled]
            heapq.heapify(self._returning)
            return
        tenant = scheduled.tenant
        jobs = self._tenant_jobs[tenant]
        jobs.pass_over(scheduled)
        if not jobs.is_ready:
            self._ready[tenant.tier].discard(tenant.name)

    def restore_passed(self) -> None:
        """Put skipped jobs back in their places."""
        passed, self._passed = self._passed, {}
        for scheduled in passed:
            if scheduled not in self._queued:
                self._push_returning(scheduled)
        for tenant in dict.fromkeys(scheduled.tenant for scheduled in passed):
            jobs = self._tenant_jobs.get(tenant)
            if jobs is not None and len(jobs):
                jobs.restore()
                tier, name = tenant
                self._ready[tier].set(name, self._tenants[tier].counter(name))

    def head(self, above: Tier | None = None) -> ScheduledJob | None:
        """Return the job to send next, only from tiers above ``above`` if that is given.

        It stays queued.
        """
        returning = self._top_returning() if above is None else self._returning_above(above)
        if returning is not None and returning.job.tier is not Tier.BATCH:
            return returning
        among = INTERACTIVE if above is None else INTERACTIVE[: TIER_RANKS[above]]
        tiers = [tier for tier in among if len(self._ready[tier])]
        if tiers:
            return self._top(min(tiers, key=self._tiers.counter))
        if returning is not None or above is not None:
            return returning
        return self._top(Tier.BATCH) if len(self._ready[Tier.BATCH]) else None

    def _returning_above(self, tier: Tier) -> ScheduledJob | None:
        valid = [
            item
            for item in self._returning
            if self._members.get(item[3]) == item[2]
            and TIER_RANKS[item[3].job.tier] < TIER_RANKS[tier]
        ]
        return min(valid)[3] if valid else None

    def _top_returning(self) -> ScheduledJob | None:
        while self._returning:
            _, _, number, scheduled = self._returning[0]
            if self._members.get(scheduled) == number:
                return scheduled
            heapq.heappop(self._returning)
        return None

    def _top(self, tier: Tier) -> ScheduledJob | None:
        name = self._ready[tier].least()
        if name is None:
            return None
        return self._tenant_jobs[Tenant(tier, name)].head()

    def _urgency(self, scheduled: ScheduledJob) -> tuple[float, int]:
        number = scheduled.lease.stream_sequence
        if self._shortest:
            # Each ``ageing_s`` of waiting halves the length. As all jobs age alike, the time of the
            # pull stands for the time waited.
            length = math.log2(max(scheduled.service.output_tokens, 1.0))
            return length + scheduled.timing.pulled_s / self._ageing_s, number
        deadline_ns = scheduled.job.deadline_ns
        return float(_NEVER_NS if deadline_ns is None else deadline_ns), number

    # --- service ---

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Charge tokens to a tenant; negative tokens are a refund."""
        tier, name = tenant
        self._tenants[tier].charge(name, tokens)
        if tier is not Tier.BATCH:
            self._tiers.charge(tier, tokens / self._weights[tier])
        if name in self._ready[tier]:
            self._ready[tier].set(name, self._tenants[tier].counter(name))

    def charge_attempt(self, scheduled: ScheduledJob, num_cached_tokens: int) -> None:
        """Charge an attempt on a worker that has this many tokens of the prompt cached."""
        scheduled.service.charged_tokens = scheduled.service.tokens - num_cached_tokens
        self.charge(scheduled.tenant, scheduled.service.charged_tokens)

    def refund_attempt(self, scheduled: ScheduledJob) -> None:
        """Refund the estimated charge of an attempt that is over.

        Actual usage is charged on its report.
        """
        if scheduled.service.charged_tokens:
            self.charge(scheduled.tenant, -scheduled.service.charged_tokens)
            scheduled.service.charged_tokens = 0.0

    def rank_of(self, tier: Tier) -> tuple[bool, float]:
        """Return a sort key of tiers: the lowest is served next."""
        return tier is Tier.BATCH, self._tiers.counter(tier)

    def counters(self, tier: Tier) -> VirtualTokens[str]:
        """Return the served tokens of a tier's tenants."""
        return self._tenants[tier]

    def lead(self, tier: Tier, over: Tier) -> float:
        """Return by how much a tier's served tokens, for its weight, exceed another's."""
        floored = self._tiers.floored_counter
        return floored(tier) - floored(over)

    def num_of(self, tier: Tier) -> int:
        """Return the number of a tier's jobs that wait here."""
        return self._num_of[tier]

    def num_here(self, tier: Tier) -> int:
        """Return the number of a tier's jobs that wait or are being prepared here."""
        return self._num_of[tier] + self._num_expected[tier]

    # --- the order of all ---

    def in_order(self) -> list[ScheduledJob]:
        """Return all waiting jobs in the order of sending.

        Assumes that no other job comes and each takes its expected service.
        """
        returning = self.returning()
        first = [scheduled for scheduled in returning if scheduled.job.tier is not Tier.BATCH]
        last = [scheduled for scheduled in returning if scheduled.job.tier is Tier.BATCH]
        return [*first, *self._rounds(INTERACTIVE), *last, *self._rounds((Tier.BATCH,))]

    def returning(self) -> list[ScheduledJob]:
        """Return interrupted jobs in their order."""
        found = [item for item in self._returning if self._members.get(item[3]) == item[2]]
        return [scheduled for _, _, _, scheduled in sorted(found)]

    def by_tenant(self) -> dict[Tenant, list[ScheduledJob]]:
        """Return jobs that were not interrupted by tenant, each tenant's in their order."""
        return {
            Tenant(tier, name): self._tenant_jobs[Tenant(tier, name)].in_order()
            for tier in Tier
            for name in self._ready[tier]
        }

    def floored_counter(self, tier: Tier) -> float:
        """Return a tier's served tokens for its weight, lifted as if it became active now."""
        return self._tiers.floored_counter(tier)

    def _rounds(self, tiers: tuple[Tier, ...]) -> Iterator[ScheduledJob]:
        return _interleaved(
            (self._tiers.counter(tier), self._weights[tier], self._tenants_in_turn(tier))
            for tier in tiers
            if len(self._ready[tier])
        )

    def _tenants_in_turn(self, tier: Tier) -> Iterator[ScheduledJob]:
        tenants = [Tenant(tier, name) for name in self._ready[tier]]
        return _interleaved(
            (self._tenants[tier].counter(one.name), 1.0, iter(self._tenant_jobs[one].in_order()))
            for one in tenants
        )


def weights_of(tiers: TierPolicies) -> dict[Tier, float]:
    """Return the weight of each tier."""
    return {tier: getattr(tiers, tier.value).weight for tier in Tier}


def _interleaved(
    sources: Iterable[tuple[float, float, Iterator[ScheduledJob]]],
) -> Iterator[ScheduledJob]:
    """Merge several sources of jobs, each with a counter of its service and a weight.

    The next job always comes from the source that was served least.
    """
    heap = [
        (counter, number, weight, jobs) for number, (counter, weight, jobs) in enumerate(sources)
    ]
    heapq.heapify(heap)
    while heap:
        counter, number, weight, jobs = heap[0]
        scheduled = next(jobs, None)
        if scheduled is None:
            heapq.heappop(heap)
            continue
        yield scheduled
        counter += scheduled.service.tokens / weight
        heapq.heapreplace(heap, (counter, number, weight, jobs))
