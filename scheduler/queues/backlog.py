"""Where the jobs of one model wait: tenant queue by tenant queue, in the queue and here."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from millrace.bus.job_queue import TenantQueue
from millrace.scheduler.jobs.scheduled_job import TenantQueueCounts
from millrace.schemas.jobs import Tier

# All jobs of a tenant queue seem to be held: a lease may have lapsed, so it is tried now and then.
_TRY_AGAIN_S = 1.0


class Pullable(NamedTuple):
    """A tenant queue of which ``num_to_pull`` jobs may be in the queue, and ``num_here`` wait
    here."""

    tenant_queue: TenantQueue
    num_to_pull: int
    num_here: int


class Backlog:
    """What is known of the tenant queues of one model. Pure: the caller passes the time in.

    ``published`` announces a job, and may be lost; ``counted`` is the truth now and then.
    """

    def __init__(self) -> None:
        self._tenant_queues: dict[TenantQueue, TenantQueueCounts] = {}

    def __len__(self) -> int:
        return len(self._tenant_queues)

    # --- what is heard of the queue ---

    def published(self, tenant_queue: TenantQueue) -> bool:
        """Whether there is something to pull that nobody waits for."""
        state = self.of(tenant_queue)
        state.num_announced += 1
        if state.num_announced <= 0:
            return False
        state.num_waiting += 1
        return not state.is_pulled

    def counted(self, totals: Mapping[TenantQueue, int], now_s: float) -> None:
        """How many jobs each tenant queue has, whoever holds them; tenant
        queues that are left out have none."""
        for tenant_queue in totals:
            self.of(tenant_queue)
        for tenant_queue, state in self._tenant_queues.items():
            state.total = totals.get(tenant_queue, 0)
            # What was stored after the count is announced, but not counted.
            found = state.total - state.num_ours - state.num_others
            state.num_announced = max(0, state.num_announced)
            state.num_waiting = max(found, state.num_announced, 0)
            state.is_due = bool(state.total) and now_s - state.pulled_s >= _TRY_AGAIN_S
            if state.total or state.num_ours:
                state.idle_since_s = None
            elif state.idle_since_s is None:
                state.idle_since_s = now_s

    def pulling(self, tenant_queue: TenantQueue) -> None:
        """A pull begins; it may miss what is announced from now on."""
        state = self.of(tenant_queue)
        state.is_pulled = True
        state.num_announced_before = state.num_announced

    def waited(self, tenant_queue: TenantQueue, num_got: int, now_s: float) -> None:
        """What a pull brought that was out before the job, before that is ours. It may be
        announced later."""
        state = self.of(tenant_queue)
        num_announced = state.num_announced
        self.pulled(tenant_queue, num_got, num_got, now_s)
        if num_got:
            state.num_announced = num_announced - num_got

    def pulled(
        self, tenant_queue: TenantQueue, num_wanted: int, num_got: int, now_s: float
    ) -> None:
        """What a pull brought, before those that it brought are ours."""
        state = self.of(tenant_queue)
        state.is_pulled = state.is_due = False
        state.pulled_s = now_s
        if num_got and not state.num_waiting:
            # All seemed to be others', and here is one: count anew.
            state.num_others = 0
        state.num_announced = max(0, state.num_announced - (num_got or state.num_announced_before))
        state.num_waiting = max(0, state.num_waiting - num_got)
        if not num_got:
            state.num_waiting = state.num_announced
            state.num_others = max(0, state.total - state.num_ours)
        elif num_got < num_wanted and state.num_waiting:
            # More may have come meanwhile: the next pull shows.
            state.num_waiting = max(1, state.num_waiting)

    def pull_failed(self, tenant_queue: TenantQueue) -> None:
        """Nobody knows whether there was anything."""
        self.of(tenant_queue).is_pulled = False

    def doubt_others(self) -> None:
        """What others had may be in the queue again: count anew."""
        for state in self._tenant_queues.values():
            state.num_others = 0
            state.num_waiting = max(state.total - state.num_ours, state.num_announced, 0)

    # --- what follows ---

    def num_waiting(self, tenant_queue: TenantQueue) -> int:
        state = self._tenant_queues.get(tenant_queue)
        return 0 if state is None else state.num_waiting

    def tenant_queues(self) -> list[TenantQueue]:
        """All that are known."""
        return list(self._tenant_queues)

    def to_pull(self, tiers: Container[Tier]) -> Iterator[Pullable]:
        """Tenant queues of these tiers that a pull may bring jobs of, unless one is under way: one
        job where a lease may have lapsed. They may be a thousand, so that nothing is looked up."""
        return (
            Pullable(tenant_queue, state.num_waiting or 1, state.num_here)
            for tenant_queue, state in self._tenant_queues.items()
            if (state.num_waiting or state.is_due)
            and not state.is_pulled
            and tenant_queue.tier in tiers
        )

    def waiting(self) -> dict[TenantQueue, int]:
        """The tenant queues with jobs in the queue, and how many."""
        return {
            tenant_queue: state.num_waiting
            for tenant_queue, state in self._tenant_queues.items()
            if state.num_waiting
        }

    def waiting_published(self) -> dict[TenantQueue, int]:
        """Tenant queues of services with jobs in the queue, and how many there were when they were
        counted, at most: other schedulers may hold some."""
        return {
            tenant_queue: num_waiting
            for tenant_queue, state in self._tenant_queues.items()
            if not tenant_queue.reserved and (num_waiting := state.total - state.num_ours) > 0
        }

    def num_published(self) -> int:
        """Jobs that services published and that wait, in the queue or here."""
        return sum(
            state.num_waiting + state.num_here
            for tenant_queue, state in self._tenant_queues.items()
            if not tenant_queue.reserved
        )

    def idle(self, now_s: float, for_s: float) -> list[TenantQueue]:
        """Tenant queues that have had no job for so long."""
        return [
            tenant_queue
            for tenant_queue, state in self._tenant_queues.items()
            if state.idle_since_s is not None and now_s - state.idle_since_s >= for_s
        ]

    def forget(self, tenant_queue: TenantQueue) -> None:
        """Unless it has got jobs just now."""
        state = self._tenant_queues.get(tenant_queue)
        if state is not None and not (state.num_ours or state.num_waiting or state.is_pulled):
            del self._tenant_queues[tenant_queue]

    def of(self, tenant_queue: TenantQueue) -> TenantQueueCounts:
        """What is known of a tenant queue, from now on if nothing was."""
        state = self._tenant_queues.get(tenant_queue)
        if state is None:
            state = self._tenant_queues[tenant_queue] = TenantQueueCounts()
        return state
