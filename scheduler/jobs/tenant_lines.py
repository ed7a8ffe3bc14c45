"""Tenant lines: published jobs wait in them until their tenants' limits admit them."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.bus.job_queue import TenantQueue
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.scheduler.jobs.admission import JobAdmission, NotYet, Places
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob, Tenant
from millrace.scheduler.jobs.terminal_status import TerminalStatus
from millrace.schemas.tenants import LOCAL_TENANT

# Resolved with None once a job is admitted or over, else with its terminal status.
_Decision = asyncio.Future[TerminalStatus | None]

_ANY = 1 << 30
# Jobs pulled of a tenant whose limits are unknown here. The first job asks.
_FIRST_PLACES = 1
# An end of a request frees a place at once. A missed end is found by asking again: after 1 s, then
# with exponential backoff.
_RETRY_S = 1.0
_LONGEST_RETRY_S = 16.0


@dataclass(slots=True, eq=False)
class _Line:
    """Line of one tenant.

    ``num_places`` are free, as of the last answer of the limits and later ends. ``held`` jobs were
    pulled and not admitted. ``num_pulling`` and ``undecided`` jobs are on their way to a decision.
    ``wakes`` wake the pullers that wait for a place, in their order. The limits are asked again at
    ``due_s``.
    """

    num_places: int = _FIRST_PLACES
    num_pulling: int = 0
    undecided: set[ScheduledJob] = field(default_factory=set)
    held: dict[ScheduledJob, _Decision] = field(default_factory=dict)
    wakes: dict[asyncio.Event, None] = field(default_factory=dict)
    due_s: float = math.inf
    retry_s: float = _RETRY_S
    is_asking: bool = False
    has_news: bool = False

    @property
    def num_wanted(self) -> int:
        if self.held:
            return 0
        return max(0, self.num_places - self.num_pulling - len(self.undecided))

    def next_held(self) -> ScheduledJob | None:
        def rank(scheduled: ScheduledJob) -> tuple[int, int]:
            return scheduled.job.priority, scheduled.lease.stream_sequence

        return min(self.held, key=rank, default=None)


class TenantLines:
    """Admission of each tenant's jobs by priority, then by arrival.

    A line waits in the queue on the bus. While a tenant has no place, none of its published jobs is
    pulled, except a first one if the line does not move. The few jobs that were pulled without a
    place are held here, outside of the fair queue. Every end frees a place at once (``freed``),
    also of requests from other schedulers or gateways. Pullers without a place take turns: each is
    woken when its jobs may be pulled again. Gateways' jobs never wait here. Without an
    ``admission`` no job waits here.
    """

    def __init__(self, admission: JobAdmission | None, clock: Clock, tasks: Tasks) -> None:
        self._admission = admission
        self._clock = clock
        self._tasks = tasks
        self._lines: dict[str, _Line] = {}
        self._held: dict[ScheduledJob, _Line] = {}
        self._due: list[tuple[float, str]] = []
        self._wake = asyncio.Event()

    # --- pulls ---

    def num_wanted(self, tenant_queue: TenantQueue, wake: asyncio.Event) -> int:
        """Return how many jobs of a tenant queue may be pulled; if 0, ``wake`` is set on a
        change."""
        if self._admission is None or tenant_queue.reserved:
            return _ANY
        line = self._of(tenant_queue.tenant or LOCAL_TENANT)
        num_wanted = line.num_wanted
        if not num_wanted:
            line.wakes.setdefault(wake)
        return num_wanted

    def pulling(self, tenant_queue: TenantQueue, num_jobs: int) -> None:
        """Count the begin of a pull; a negative ``num_jobs`` counts its end.

        Its jobs are ``undecided``.
        """
        if self._admission is not None and not tenant_queue.reserved:
            self._of(tenant_queue.tenant or LOCAL_TENANT).num_pulling += num_jobs

    def is_blocked(self, tenant_queue: TenantQueue) -> bool:
        """Return whether the tenant's limits, not the workers, keep its published jobs waiting."""
        line = self._lines.get(tenant_queue.tenant or LOCAL_TENANT)
        if line is None or tenant_queue.reserved:
            return False
        return bool(line.held) or line.num_places <= 0

    def forget(self, tenant_queue: TenantQueue) -> None:
        """Forget a tenant queue that has had no job for long."""
        tenant = tenant_queue.tenant or LOCAL_TENANT
        line = self._lines.get(tenant)
        if line is not None and not (line.held or line.undecided or line.num_pulling):
            del self._lines[tenant]

    # --- jobs ---

    def undecided(self, scheduled: ScheduledJob) -> None:
        """Note a pulled job that is to be admitted or ended."""
        if self._admission is not None and not scheduled.lease.tenant_queue.reserved:
            self._of(scheduled.job.tenant).undecided.add(scheduled)

    def decided(self, scheduled: ScheduledJob) -> None:
        """Note that a job was admitted, held or ended."""
        line = self._lines.get(scheduled.job.tenant)
        if line is not None and scheduled in line.undecided:
            line.undecided.remove(scheduled)
            self._tell(line)

    async def admit(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Return None for a job that may run, else its terminal status.

        A job without a place is held. Then ``until_admitted`` returns the decision.
        """
        if self._admission is None:
            return None
        answer = await self._admission.admit(scheduled, self._learn)
        if not isinstance(answer, NotYet):
            return answer
        if not scheduled.is_ended:
            tenant = scheduled.job.tenant
            line = self._of(tenant)
            scheduled.enter(JobPhase.HELD)
            line.held[scheduled] = asyncio.get_running_loop().create_future()
            self._held[scheduled] = line
            self._put_off(tenant, line, answer)
            self.decided(scheduled)
        return None

    async def until_admitted(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Wait for a held job's decision:

        None if it is admitted or over, else its terminal status.
        """
        line = self._held.get(scheduled)
        return None if line is None else await line.held[scheduled]

    def close(self) -> None:
        """Stop waiting for places. The held jobs are given back."""
        for scheduled, line in self._held.items():
            line.held[scheduled].cancel()

    def leave(self, scheduled: ScheduledJob) -> None:
        """Remove a job that is over and may be held here."""
        line = self._held.pop(scheduled, None)
        if line is not None:
            _decide(line.held.pop(scheduled), None)
            # The next job of the line may be over, too.
            line.num_places = max(line.num_places, 1)
            self._try(scheduled.job.tenant, line)

    def held(self) -> Iterable[ScheduledJob]:
        """Return the held jobs in the order of their arrival here."""
        return self._held

    def held_of(self, tenant: Tenant) -> list[ScheduledJob]:
        """Return the held jobs of one tenant in one tier, the newest last."""
        line = self._lines.get(tenant.name)
        held = () if line is None else (one for one in line.held if one.tenant == tenant)
        return sorted(held, key=lambda one: one.lease.stream_sequence)

    # --- places ---

    def freed(self, tenant: str) -> None:
        """Note that a request of the tenant has ended."""
        line = self._lines.get(tenant)
        if line is None or line.num_places >= _ANY:
            return
        if line.wakes or line.num_places < _FIRST_PLACES:
            line.num_places += 1
        line.has_news = True
        # If the end is not settled yet, the place is free in a moment.
        line.retry_s = _RETRY_S
        self._try(tenant, line)

    async def run(self) -> None:
        """Ask the limits again when due. Runs until it is cancelled."""
        while True:
            self._wake.clear()
            now_s = self._clock.monotonic()
            while self._due and self._due[0][0] <= now_s:
                due_s, tenant = heapq.heappop(self._due)
                line = self._lines.get(tenant)
                if line is not None and line.due_s == due_s:
                    line.due_s = math.inf
                    line.num_places = max(line.num_places, 1)
                    self._try(tenant, line)
            rest_s = self._due[0][0] - now_s if self._due else _LONGEST_RETRY_S
            await wait_or_sleep(self._wake, self._clock, rest_s)

    def _of(self, tenant: str) -> _Line:
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        return line

    def _learn(self, tenant: str, places: Places) -> None:
        """Record the remaining places of a tenant's limits."""
        line = self._of(tenant)
        line.num_places = _ANY if places.num_places is None else places.num_places
        if places.is_granted:
            line.retry_s = _RETRY_S
        if not line.num_places:
            self._ask_at(tenant, line, line.retry_s)

    def _put_off(self, tenant: str, line: _Line, answer: NotYet) -> None:
        wait_s = min(answer.wait_s, _LONGEST_RETRY_S)
        if answer.ends_free_it:
            wait_s = max(wait_s, line.retry_s)
            line.retry_s = min(line.retry_s * 2, _LONGEST_RETRY_S)
        self._ask_at(tenant, line, wait_s)

    def _ask_at(self, tenant: str, line: _Line, wait_s: float) -> None:
        line.due_s = self._clock.monotonic() + wait_s
        heapq.heappush(self._due, (line.due_s, tenant))
        if self._due[0][0] == line.due_s:
            self._wake.set()

    def _try(self, tenant: str, line: _Line) -> None:
        """Offer a possible place to the held jobs first, then to a pull."""
        if not line.held:
            self._tell(line)
        elif not line.is_asking:
            line.is_asking = True
            self._tasks.spawn(self._ask(tenant, line), f"admit jobs of {tenant}")

    def _tell(self, line: _Line) -> None:
        if line.wakes and line.num_wanted:
            wakes, line.wakes = line.wakes, {}
            for wake in wakes:
                wake.set()

    async def _ask(self, tenant: str, line: _Line) -> None:
        """Admit the held jobs in turn, until one has to wait."""
        assert self._admission is not None, "jobs are held by their limits"
        try:
            while (scheduled := line.next_held()) is not None:
                line.has_news = False
                answer = await self._admission.admit(scheduled, self._learn)
                if isinstance(answer, NotYet):
                    if scheduled.is_ended or line.has_news:
                        continue
                    self._put_off(tenant, line, answer)
                    return
                self._held.pop(scheduled, None)
                decision = line.held.pop(scheduled, None)
                if decision is not None:
                    _decide(decision, answer)
        finally:
            line.is_asking = False
        self._tell(line)


def _decide(decision: _Decision, answer: TerminalStatus | None) -> None:
    if not decision.done():
        decision.set_result(answer)
