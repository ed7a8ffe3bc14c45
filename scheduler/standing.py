"""Pulls that are out before there is a job, so that the queue sends one as it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.api import LeasedJob, Line
from scheduler.backlog import Backlog
from scheduler.parts import Parts
from scheduler.tasks import Tasks
from schemas.errors import BusUnavailableError

# Each is a request that the queue keeps, and one more every few seconds.
_MAX_STANDING = 256
_WAIT_S = 2.5
# A line that had no job for this long is no longer waited for.
_KEEP_S = 60.0


class StandingPulls:
    """At most one for each line that was empty when it was last pulled, as long as ``may_stand``
    says that a job of it would be sent at once. Saves the job a way to the scheduler and back.

    ``admit`` takes what comes, ``on_done`` sees each task that ends.
    """

    def __init__(
        self,
        parts: Parts,
        backlog: Backlog,
        may_stand: Callable[[Line], bool],
        admit: Callable[[LeasedJob], None],
        on_done: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._parts = parts
        self._backlog = backlog
        self._may_stand = may_stand
        self._admit = admit
        self._on_done = on_done
        self._tasks = Tasks()

    def begin(self, line: Line) -> None:
        """Wait for the next job of a line, if there is room for it."""
        if len(self._tasks) >= _MAX_STANDING or self._backlog.is_standing(line):
            return
        if self._parts.bus.connected and self._may_stand(line):
            self._backlog.stands(line, True)
            self._tasks.spawn(self._stand(line), f"wait for {line}").add_done_callback(
                self._on_done
            )

    async def close(self) -> None:
        await self._tasks.close()

    async def _stand(self, line: Line) -> None:
        clock = self._parts.clock
        had_job_s = clock.monotonic()
        try:
            while self._parts.bus.connected and self._may_stand(line):
                pulled = await self._parts.bus.jobs.pull(line, 1, _WAIT_S)
                if pulled:
                    had_job_s = clock.monotonic()
                    self._backlog.brought(line)
                elif clock.monotonic() - had_job_s > _KEEP_S:
                    return
                for leased in pulled:
                    self._admit(leased)
        except BusUnavailableError:
            return  # a pull that somebody needs says so
        finally:
            self._backlog.stands(line, False)
