"""Pulls jobs when there is room for them or too few to choose from, and makes them ready."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from bus.api import LeasedJob, Line
from runtime.tasks import Tasks
from scheduler.dispatch.context import Parts
from scheduler.dispatch.dispatcher import Lane
from scheduler.dispatch.sender import Sender
from scheduler.intake.model_cache import Shelf
from scheduler.jobs.entry import Entry, State
from scheduler.jobs.terminal_status import Verdict, failed, refused
from scheduler.queues.backlog import Backlog, Pullable
from scheduler.queues.fair_queue import Tenant
from schemas.errors import BusUnavailableError, MillraceError
from schemas.jobs import Tier

logger = logging.getLogger(__name__)

_MAX_JOBS_PER_PULL = 64
_MAX_PULLS = 8
_RETRY_S = 0.25
# Who comes next is looked for among all lines, so a window that is nearly full waits for this share
# of its jobs to go, or for the next count.
_REFILL_SHARE = 16
# Pulls that are out before there is a job: each is a request that the queue keeps, made anew every
# few seconds, and for a line that had a job lately.
_MAX_WAITS = 256
_WAIT_S = 2.5
_WAIT_AFTER_JOB_S = 60.0


class _Limits(NamedTuple):
    """For one tier: how many jobs could be sent at once beside those that are here, and how many
    the window of the tier takes."""

    room: int
    window: int


class Intake:
    """Pulls from the lines of one model, those who were served least first, for its lane, or for
    the first of several that its jobs may go to."""

    def __init__(
        self,
        parts: Parts,
        model: str,
        lanes: Mapping[str, Lane],
        models: Collection[str],
        shelf: Shelf,
    ) -> None:
        """``lanes`` are all that there are, by model; ``models`` those that these jobs may go
        to."""
        self.model = model
        self.backlog = Backlog()
        self._parts = parts
        self._by_model = lanes
        self._lanes = [lanes[one] for one in models]
        self._shelf = shelf
        self._wake = asyncio.Event()
        self._is_counted = False
        for lane in self._lanes:
            lane.wakes.append(self._wake)
        self._sender = Sender(parts)
        self._pulls = Tasks()
        self._waits = Tasks()
        self._num_asked = dict.fromkeys(Tier, 0)
        self._resting_until_s = float("-inf")
        self._failure: BaseException | None = None

    @property
    def lane(self) -> Lane:
        """The one that its jobs wait for while they are in the queue: one that is served, if any
        is."""
        return next((lane for lane in self._lanes if lane.is_served), self._lanes[0])

    def published(self, line: Line) -> None:
        """A job has come."""
        if self.backlog.published(line):
            self._want(line)
            self._wake.set()

    def leases_released(self) -> None:
        """Jobs that others had are in the queue again."""
        self.backlog.doubt_others()
        for line in self.backlog.lines():
            self._want(line)
        self._wake.set()

    def counted(self, totals: dict[Line, int]) -> None:
        """What the queue has of each line."""
        self.backlog.counted(totals, self._parts.clock.monotonic())
        self._is_counted = True
        for line in self.backlog.lines():
            self._want(line)
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises what ends a pull but an outage."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._failure is not None:
                    raise self._failure
                self._pull_all()
        finally:
            await self._pulls.close()
            await self._waits.close()

    def _pull_all(self) -> None:
        spare = _MAX_PULLS - len(self._pulls)
        if spare <= 0 or not self._parts.bus.connected or self._is_resting():
            return
        if not any(lane.is_served for lane in self._lanes):
            return
        least = 0 if self._is_counted else self._parts.config.window_jobs // _REFILL_SHARE
        self._is_counted = False
        limits = {tier: self._limits(tier) for tier in Tier}
        queue = self._lanes[0].queue
        ranks = {
            tier: (*queue.rank_of(tier), queue.counters(tier))
            for tier in Tier
            if limits[tier].window > 0 and (limits[tier].room > 0 or limits[tier].window >= least)
        }

        def rank(pullable: Pullable) -> tuple[bool, float, float]:
            is_batch, counter, counters = ranks[pullable.line.tier]
            return is_batch, counter, counters.counter(pullable.line.tenant or "")

        candidates = (
            pullable
            for pullable in self.backlog.to_pull(ranks)
            if self._num_wanted(pullable, limits[pullable.line.tier]) > 0
        )
        for pullable in heapq.nsmallest(spare, candidates, rank):
            line = pullable.line
            num_wanted = self._num_wanted(pullable, self._limits(line.tier))
            if num_wanted > 0:
                self._num_asked[line.tier] += num_wanted
                self.backlog.pulling(line)
                pull = self._pulls.spawn(self._pull(line, num_wanted), f"pull {line}")
                pull.add_done_callback(self._note_failure)

    def _note_failure(self, pull: asyncio.Task[None]) -> None:
        if not pull.cancelled() and (error := pull.exception()) is not None:
            self._failure = error
            self._wake.set()

    def _is_resting(self) -> bool:
        return self._parts.clock.monotonic() < self._resting_until_s

    def _limits(self, tier: Tier) -> _Limits:
        is_batch = tier is Tier.BATCH
        num_asked = sum([n for of, n in self._num_asked.items() if (of is Tier.BATCH) is is_batch])
        room = max([lane.spare_room(tier) for lane in self._lanes]) - num_asked
        room = max(room, 0)
        num_here = sum([lane.num_of(tier) for lane in self._lanes])
        window = self._parts.config.window_jobs + room - num_here - self._num_asked[tier]
        return _Limits(room, window)

    def _num_wanted(self, pullable: Pullable, limits: _Limits) -> int:
        """How many jobs of a line to pull now: as many as there is room for beside what is here
        already, and a few to choose from."""
        of_tenant = self._parts.config.window_jobs_per_tenant + limits.room - pullable.num_here
        return min(_MAX_JOBS_PER_PULL, limits.window, pullable.num_to_pull, of_tenant)

    async def _pull(self, line: Line, num_wanted: int) -> None:
        parts = self._parts
        pulled: list[LeasedJob] | None = None
        try:
            pulled = await parts.bus.jobs.pull(line, num_wanted, 0.0)
        except BusUnavailableError as error:
            logger.warning("the queue cannot be read", extra={"reason": error.message})
            self._resting_until_s = parts.clock.monotonic() + _RETRY_S
        finally:
            self._num_asked[line.tier] -= num_wanted
            if pulled or (pulled is not None and parts.bus.connected):
                self.backlog.pulled(line, num_wanted, len(pulled), parts.clock.monotonic())
            else:
                self.backlog.pull_failed(line)
        self._took(line, pulled or [])
        if pulled is not None and len(self._waits) < _MAX_WAITS and self._may_wait(line):
            wait = self._waits.spawn(self._wait_for_next(line), f"wait for {line}")
            wait.add_done_callback(self._note_failure)

    def _may_wait(self, line: Line) -> bool:
        """Nothing of the line is in the queue, and a job that came now would be sent at once."""
        if self.backlog.num_waiting(line) or not self._parts.bus.connected:
            return False
        return self._limits(line.tier).room > 0

    async def _wait_for_next(self, line: Line) -> None:
        """Have a pull out when the next job is stored, which saves it the news and the pull."""
        parts = self._parts
        had_job_s = parts.clock.monotonic()
        while self._may_wait(line) and parts.clock.monotonic() - had_job_s < _WAIT_AFTER_JOB_S:
            self.backlog.pulling(line)
            pulled: list[LeasedJob] | None = None
            try:
                pulled = await parts.bus.jobs.pull(line, 1, _WAIT_S)
            except BusUnavailableError:
                return  # a pull that somebody needs says so
            finally:
                if pulled or (pulled is not None and parts.bus.connected):
                    self.backlog.waited(line, len(pulled), parts.clock.monotonic())
                else:
                    self.backlog.pull_failed(line)
            if pulled:
                had_job_s = parts.clock.monotonic()
            self._took(line, pulled)

    def _took(self, line: Line, pulled: list[LeasedJob]) -> None:
        for leased in pulled:
            self.admit(leased)
        self._want(line)
        self._wake.set()

    def _want(self, line: Line) -> None:
        """Tell the queues who has jobs behind those that are here, where the line says so."""
        if line.tenant is None:
            return
        num_waiting = self.backlog.num_waiting(line) + self.backlog.num_waiting(line.twin)
        for lane in self._lanes:
            is_more = bool(num_waiting)
            lane.queue.want(_tenant_of(line), is_more, self.model)

    # --- what was pulled ---

    def admit(self, leased: LeasedJob) -> None:
        """Answer for a delivered job from now on."""
        now_s = self._parts.clock.monotonic()
        entry = self._parts.table.get(leased.job.request_id)
        if entry is not None and entry.stream_sequence == leased.stream_sequence:
            entry.take_over(leased, now_s)
            if entry.state is State.RUNNING:
                self._by_model[entry.job.model].continue_where_it_runs(entry, entry.worker_id)
            return
        if entry is not None:
            # The same id was published anew, so the former job had ended.
            self._by_model[entry.job.model].ended(entry)
        self._take(self._entry(leased), self._lanes[0])

    def _entry(self, leased: LeasedJob) -> Entry:
        return Entry.of(leased, self.backlog.of(leased.line), self._parts.clock.monotonic())

    def _take(self, entry: Entry, lane: Lane) -> None:
        lane.took(entry)
        if self._parts.traces is not None:
            entry.job, entry.trace = self._parts.traces.start(
                entry.job, entry.num_deliveries, entry.stored_ns
            )
        self._parts.tasks.spawn(self._prepare(entry, lane), f"prepare {entry.request_id}")

    async def _refuse(self, entry: Entry, verdict: Verdict) -> None:
        try:
            await self._parts.endings.end(entry, verdict)
        except BusUnavailableError as error:
            logger.warning("a job will be refused later", extra={"reason": error.message})

    async def _prepare(self, entry: Entry, lane: Lane) -> None:
        try:
            await self._make_ready(entry, lane)
        except MillraceError as error:
            lane.end(entry, refused(error))
        except Exception as error:
            logger.exception("a job could not be prepared", extra={"request_id": entry.request_id})
            message = f"The job could not be prepared: {type(error).__name__}."
            lane.end(entry, failed(MillraceError.code, message, retryable=False))
        finally:
            lane.pump()

    async def _make_ready(self, entry: Entry, lane: Lane) -> None:
        parts = self._parts
        verdict = parts.unwanted(entry)
        if verdict is None:
            entry.job = await self._shelf.prepare(entry.job)
            verdict = parts.unwanted(entry)
        if entry.is_ended:
            return
        if verdict is None and entry.uncertain and not entry.ran_before:
            entry.ran_before = await self._sender.is_known(entry)
        if verdict is None and parts.door is not None:
            verdict = await parts.door.let_in(entry)
        if verdict is not None:
            lane.end(entry, verdict)
        elif entry.ran_before:
            await self._make_ready_again(entry, lane)
        elif entry.state is State.PREPARING:
            lane.enqueue(entry)

    async def _make_ready_again(self, entry: Entry, lane: Lane) -> None:
        """A job that was delivered before may be answered, or run somewhere still."""
        holder = await self._sender.last_holder(entry)
        if entry.is_ended:
            return
        entry.interrupted = bool(holder)
        if holder is None:
            lane.answered(entry)
        elif holder and self._parts.fleet.get(holder) is not None:
            lane.continue_where_it_runs(entry, holder)
        else:
            lane.enqueue(entry)


def _tenant_of(line: Line) -> Tenant:
    return Tenant(line.tier, line.tenant or "")
