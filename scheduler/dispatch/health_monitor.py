"""What has to be done from time to time: leases, silent workers, deadlines, doubts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from millrace.runtime.clock import until_beat_s
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.fleet.fleet import Departed
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob
from millrace.schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

TICK_S = 0.1
# While no job is here, only workers that fall silent are to be noticed.
_REST_TICK_S = 0.5
# A job that nothing was heard of for this long is looked up in the queue.
_CHECK_AFTER_S = 30.0
_MAX_CHECKS_PER_TICK = 64
_NEVER_S = float("-inf")


class HealthMonitor:
    """Ticks, less often while there is no job. ``on_departed``, ``on_ended`` and
    ``finish_unwanted`` act on what it finds."""

    def __init__(
        self,
        context: SchedulerContext,
        on_departed: Callable[[Sequence[Departed]], None],
        on_ended: Callable[[ScheduledJob], None],
        finish_unwanted: Callable[[], None],
    ) -> None:
        self._context = context
        self._on_departed = on_departed
        self._on_ended = on_ended
        self._finish_unwanted = finish_unwanted
        self._tasks = Tasks()
        self._last_tick_s = context.clock.monotonic()
        self._interval_s = TICK_S
        self._was_disconnected = False

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self.tick()
                await self._rest()
        finally:
            await self._tasks.close()

    async def _rest(self) -> None:
        clock, has_jobs = self._context.clock, self._context.job_table.has_jobs
        self._interval_s = TICK_S if has_jobs.is_set() else _REST_TICK_S
        sleep_s = until_beat_s(clock, self._interval_s)
        if has_jobs.is_set():
            await clock.sleep(sleep_s)
        else:
            await wait_or_sleep(has_jobs, clock, sleep_s)

    def reconnected(self) -> None:
        """Heartbeats and notices of ends were missed."""
        self._was_disconnected = True
        for scheduled in self._context.job_table:
            scheduled.timing.checked_s = _NEVER_S
            scheduled.timing.extended_s = _NEVER_S

    def check_soon(self, scheduled: ScheduledJob) -> None:
        """It may have ended: look it up at the next tick."""
        scheduled.timing.checked_s = _NEVER_S

    def tick(self) -> None:
        context, now_s = self._context, self._context.clock.monotonic()
        late_s = now_s - self._last_tick_s - self._interval_s
        self._last_tick_s = now_s
        if not context.bus.connected:
            self._was_disconnected = True
            return
        if self._was_disconnected or late_s > context.config.heartbeat_timeout_s / 2:
            # Their heartbeats may not have been read yet.
            self._was_disconnected = False
            context.fleet.forgive(now_s)
        departed = context.fleet.expire(now_s)
        if departed:
            self._on_departed(departed)
        self._finish_unwanted()
        self._extend_leases(now_s)
        self._check_doubtful(now_s)

    # --- leases ---

    def _extend_leases(self, now_s: float) -> None:
        due = [
            scheduled
            for scheduled in self._context.job_table
            if scheduled.holds_lease
            and now_s - scheduled.timing.extended_s >= self._context.config.lease_extend_s
        ]
        for scheduled in due:
            scheduled.timing.extended_s = now_s
        if due:
            self._tasks.spawn(
                self._extend([scheduled.lease.token for scheduled in due]), "extend leases"
            )

    async def _extend(self, leases: Iterable[str]) -> None:
        try:
            for lease in leases:
                await self._context.bus.jobs.extend(lease)
        except BusUnavailableError as error:
            logger.warning("leases could not be extended", extra={"reason": error.message})

    # --- doubts ---

    def _check_doubtful(self, now_s: float) -> None:
        for worker in self._context.fleet.doubtful():
            worker.trust()
            for request_id in worker.runs:
                scheduled = self._context.job_table.get(request_id)
                if scheduled is not None:
                    scheduled.timing.checked_s = _NEVER_S
        due = [one for one in self._context.job_table if _is_due(one, now_s)]
        due = due[:_MAX_CHECKS_PER_TICK]
        for scheduled in due:
            scheduled.timing.checked_s = now_s
        if due:
            self._tasks.spawn(self._check(due), "look up requests")

    async def _check(self, scheduled_jobs: Collection[ScheduledJob]) -> None:
        try:
            for scheduled in scheduled_jobs:
                is_open = await self._context.bus.jobs.is_open(scheduled.lease.stream_sequence)
                if not is_open and scheduled.phase in (Phase.RUNNING, Phase.WAITING):
                    self._on_ended(scheduled)
        except BusUnavailableError as error:
            for scheduled in scheduled_jobs:
                self.check_soon(scheduled)
            logger.warning("requests could not be looked up", extra={"reason": error.message})


def _is_due(scheduled: ScheduledJob, now_s: float) -> bool:
    """Whether to look up if the job has ended meanwhile."""
    checked_s = scheduled.timing.checked_s
    if scheduled.phase is Phase.RUNNING:
        return now_s - checked_s >= _CHECK_AFTER_S
    return scheduled.phase is Phase.WAITING and checked_s == _NEVER_S
