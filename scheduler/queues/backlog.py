"""Backlog: where one model's jobs wait, by tenant queue, on the bus and in this scheduler."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from millrace.bus.job_queue import TenantQueue
from millrace.scheduler.jobs.scheduled_job import TenantQueueCounts
from millrace.schemas.jobs import Tier

# Retry interval of a tenant queue whose jobs all seem to be leased: a lease may have lapsed.
_TRY_AGAIN_S = 1.0


class Pullable(NamedTuple):
    """Tenant queue with up to ``num_to_pull`` jobs on the bus and ``num_here`` in this
    scheduler."""

    tenant_queue: TenantQueue
    num_to_pull: int
    num_here: int


class Backlog:
    """Backlog of one model's tenant queues. Pure: the caller passes the time.

    ``published`` announces a job, and announcements may be lost. ``counted`` corrects the numbers
    from time to time.
    """

    def __init__(self) -> None:
        self._tenant_queues: dict[TenantQueue, TenantQueueCounts] = {}

    def __len__(self) -> int:
        return len(self._tenant_queues)

    # --- counts ---

    def published(self, tenant_queue: TenantQueue) -> bool:
        """Count an announced job; return whether a pull should be started for it."""
        state = self.of(tenant_queue)
        state.num_announced += 1
        if state.num_announced <= 0:
            return False
        state.num_waiting += 1
        return not state.is_pulled

    def counted(self, totals: Mapping[TenantQueue, int], now_s: float) -> None:
        """Take the number of jobs in each tenant queue, also leased ones.

        Absent queues have none.
        """
        for tenant_queue in totals:
            self.of(tenant_queue)
        for tenant_queue, state in self._tenant_queues.items():
            state.total = totals.get(tenant_queue, 0)
            # Jobs stored after the count are announced but not counted.
            found = state.total - state.num_ours - state.num_others
            state.num_announced = max(0, state.num_announced)
            state.num_waiting = max(found, state.num_announced, 0)
            state.is_due = bool(state.total) and now_s - state.pulled_s >= _TRY_AGAIN_S
            if state.total or state.num_ours:
                state.idle_since_s = None
            elif state.idle_since_s is None:
                state.idle_since_s = now_s

    def pulling(self, tenant_queue: TenantQueue) -> None:
        """Note that a pull begins. It may miss jobs that are announced from now on."""
        state = self.of(tenant_queue)
        state.is_pulled = True
        state.num_announced_before = state.num_announced

    def waited(self, tenant_queue: TenantQueue, num_got: int, now_s: float) -> None:
        """Note the result of a pull that waited for a job, before the job counts as ours.

        The job may be announced later.
        """
        state = self.of(tenant_queue)
        num_announced = state.num_announced
        self.pulled(tenant_queue, num_got, num_got, now_s)
        if num_got:
            state.num_announced = num_announced - num_got

    def pulled(
        self, tenant_queue: TenantQueue, num_wanted: int, num_got: int, now_s: float
    ) -> None:
        """Note the result of a pull, before its jobs count as ours."""
        state = self.of(tenant_queue)
        state.is_pulled = state.is_due = False
        state.pulled_s = now_s
        if num_got and not state.num_waiting:
            # All jobs seemed to be leased by others, and one came: count anew.
            state.num_others = 0
        state.num_announced = max(0, state.num_announced - (num_got or state.num_announced_before))
        state.num_waiting = max(0, state.num_waiting - num_got)
        if not num_got:
            state.num_waiting = state.num_announced
            state.num_others = max(0, state.total - state.num_ours)
        elif num_got < num_wanted and state.num_waiting:
            # More jobs may have come meanwhile. The next pull shows it.
            state.num_waiting = max(1, state.num_waiting)

    def pull_failed(self, tenant_queue: TenantQueue) -> None:
        """Note that a pull failed. Its result is unknown."""
        self.of(tenant_queue).is_pulled = False

    def doubt_others(self) -> None:
        """Count anew, as jobs of other schedulers may be in the queue again."""
        for state in self._tenant_queues.values():
            state.num_others = 0
            state.num_waiting = max(state.total - state.num_ours, state.num_announced, 0)

    # --- queries ---

    def num_waiting(self, tenant_queue: TenantQueue) -> int:
        state = self._tenant_queues.get(tenant_queue)
        return 0 if state is None else state.num_waiting

    def tenant_queues(self) -> list[TenantQueue]:
        """Return all known tenant queues."""
        return list(self._tenant_queues)

    def to_pull(self, tiers: Container[Tier]) -> Iterator[Pullable]:
        """Yield tenant queues of these tiers that a pull may bring jobs of, if none is under way.

        A queue where a lease may have lapsed is tried with one job. There may be a thousand queues,
        so this looks nothing up.
        """
        return (
            Pullable(tenant_queue, state.num_waiting or 1, state.num_here)
            for tenant_queue, state in self._tenant_queues.items()
            if (state.num_waiting or state.is_due)
            and not state.is_pulled
            and tenant_queue.tier in tiers
        )

    def waiting(self) -> dict[TenantQueue, int]:
        """Return the number of jobs on the bus by tenant queue, without zeros."""
        return {
            tenant_queue: state.num_waiting
            for tenant_queue, state in self._tenant_queues.items()
            if state.num_waiting
        }

    def waiting_published(self) -> dict[TenantQueue, int]:
        """Return the number of published jobs on the bus by tenant queue, without zeros.

        It is an upper bound, as of the last count: other schedulers may hold some.
        """
        return {
            tenant_queue: num_waiting
            for tenant_queue, state in self._tenant_queues.items()
            if not tenant_queue.reserved and (num_waiting := state.total - state.num_ours) > 0
        }

    def num_published(self) -> int:
        """Return the number of published jobs that wait, on the bus or here."""
        return sum(
            state.num_waiting + state.num_here
            for tenant_queue, state in self._tenant_queues.items()
            if not tenant_queue.reserved
        )

    def idle(self, now_s: float, for_s: float) -> list[TenantQueue]:
        """Return tenant queues without a job for at least ``for_s`` seconds."""
        return [
            tenant_queue
            for tenant_queue, state in self._tenant_queues.items()
            if state.idle_since_s is not None and now_s - state.idle_since_s >= for_s
        ]

    def forget(self, tenant_queue: TenantQueue) -> None:
        """Forget a tenant queue unless it has jobs again."""
        state = self._tenant_queues.get(tenant_queue)
        if state is not None and not (state.num_ours or state.num_waiting or state.is_pulled):
            del self._tenant_queues[tenant_queue]

    def of(self, tenant_queue: TenantQueue) -> TenantQueueCounts:
        """Return the counts of a tenant queue; new ones if it is unknown."""
        state = self._tenant_queues.get(tenant_queue)
        if state is None:
            state = self._tenant_queues[tenant_queue] = TenantQueueCounts()
        return state
