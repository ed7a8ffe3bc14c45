"""What has to be done from time to time: leases, silent workers, deadlines, doubts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from runtime.tasks import Tasks
from scheduler.dispatch.context import Parts
from scheduler.fleet.fleet import Departed
from scheduler.jobs.entry import Entry, State
from schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

TICK_S = 0.1
# An entry that nothing was heard of for this long is looked up in the queue.
_CHECK_AFTER_S = 30.0
_MAX_CHECKS_PER_TICK = 64
_NEVER_S = float("-inf")


class Watchman:
    """Ticks. ``on_departed``, ``on_ended`` and ``end_unwanted`` act on what it finds."""

    def __init__(
        self,
        parts: Parts,
        on_departed: Callable[[Sequence[Departed]], None],
        on_ended: Callable[[Entry], None],
        end_unwanted: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._on_departed = on_departed
        self._on_ended = on_ended
        self._end_unwanted = end_unwanted
        self._chores = Tasks()
        self._last_tick_s = parts.clock.monotonic()
        self._was_away = False

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self.tick()
                await self._parts.clock.sleep(TICK_S)
        finally:
            await self._chores.close()

    def reconnected(self) -> None:
        """Heartbeats and notices of ends were missed."""
        self._was_away = True
        for entry in self._parts.table:
            entry.checked_s = _NEVER_S
            entry.extended_s = _NEVER_S

    def doubt(self, entry: Entry) -> None:
        """It may have ended: look it up at the next tick."""
        entry.checked_s = _NEVER_S

    def tick(self) -> None:
        parts, now_s = self._parts, self._parts.clock.monotonic()
        late_s = now_s - self._last_tick_s - TICK_S
        self._last_tick_s = now_s
        if not parts.bus.connected:
            self._was_away = True
            return
        if self._was_away or late_s > parts.config.heartbeat_timeout_s / 2:
            # Their heartbeats may not have been read yet.
            self._was_away = False
            parts.fleet.forgive(now_s)
        departed = parts.fleet.expire(now_s)
        if departed:
            self._on_departed(departed)
        self._end_unwanted()
        self._extend_leases(now_s)
        self._check_doubtful(now_s)

    # --- leases ---

    def _extend_leases(self, now_s: float) -> None:
        due = [
            entry
            for entry in self._parts.table
            if entry.is_held and now_s - entry.extended_s >= self._parts.config.lease_extend_s
        ]
        for entry in due:
            entry.extended_s = now_s
        if due:
            self._chores.spawn(self._extend([entry.lease for entry in due]), "extend leases")

    async def _extend(self, leases: Iterable[str]) -> None:
        try:
            for lease in leases:
                await self._parts.bus.jobs.extend(lease)
        except BusUnavailableError as error:
            logger.warning("leases could not be extended", extra={"reason": error.message})

    # --- doubts ---

    def _check_doubtful(self, now_s: float) -> None:
        for worker in self._parts.fleet.doubtful():
            worker.trust()
            for request_id in worker.runs:
                entry = self._parts.table.get(request_id)
                if entry is not None:
                    entry.checked_s = _NEVER_S
        due = [
            entry
            for entry in self._parts.table
            if (entry.state is State.RUNNING and now_s - entry.checked_s >= _CHECK_AFTER_S)
            or (entry.state is State.WAITING and entry.checked_s == _NEVER_S)
        ][:_MAX_CHECKS_PER_TICK]
        for entry in due:
            entry.checked_s = now_s
        if due:
            self._chores.spawn(self._check(due), "look up requests")

    async def _check(self, entries: Collection[Entry]) -> None:
        try:
            for entry in entries:
                is_open = await self._parts.bus.jobs.is_open(entry.stream_sequence)
                if not is_open and entry.state in (State.RUNNING, State.WAITING):
                    self._on_ended(entry)
        except BusUnavailableError as error:
            for entry in entries:
                self.doubt(entry)
            logger.warning("requests could not be looked up", extra={"reason": error.message})
