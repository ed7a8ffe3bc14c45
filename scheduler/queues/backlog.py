"""Where the jobs of one model wait: line by line, in the queue and here."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from bus.api import Line
from scheduler.jobs.tenant_queue_counts import TenantQueueCounts
from schemas.jobs import Tier

# All jobs of a line seem to be held: a lease may have lapsed, so it is tried now and then.
_TRY_AGAIN_S = 1.0


class Pullable(NamedTuple):
    """A line of which ``num_to_pull`` jobs may be in the queue, and ``num_here`` wait here."""

    line: Line
    num_to_pull: int
    num_here: int


class Backlog:
    """What is known of the lines of one model. Pure: the caller passes the time in.

    ``published`` announces a job, and may be lost; ``counted`` is the truth now and then.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, TenantQueueCounts] = {}

    def __len__(self) -> int:
        return len(self._lines)

    # --- what is heard of the queue ---

    def published(self, line: Line) -> bool:
        """Whether there is something to pull that nobody waits for."""
        state = self.of(line)
        state.num_announced += 1
        if state.num_announced <= 0:
            return False
        state.num_waiting += 1
        return not state.is_pulled

    def counted(self, totals: Mapping[Line, int], now_s: float) -> None:
        """How many jobs each line has, whoever holds them; lines that are left out have none."""
        for line in totals:
            self.of(line)
        for line, state in self._lines.items():
            state.total = totals.get(line, 0)
            # What was stored after the count is announced, but not counted.
            found = state.total - state.num_ours - state.num_others
            state.num_announced = max(0, state.num_announced)
            state.num_waiting = max(found, state.num_announced, 0)
            state.is_due = bool(state.total) and now_s - state.pulled_s >= _TRY_AGAIN_S
            if state.total or state.num_ours:
                state.idle_since_s = None
            elif state.idle_since_s is None:
                state.idle_since_s = now_s

    def pulling(self, line: Line) -> None:
        """A pull begins; it may miss what is announced from now on."""
        state = self.of(line)
        state.is_pulled = True
        state.num_announced_before = state.num_announced

    def waited(self, line: Line, num_got: int, now_s: float) -> None:
        """What a pull brought that was out before the job, before that is ours. It may be
        announced later."""
        state = self.of(line)
        num_announced = state.num_announced
        self.pulled(line, num_got, num_got, now_s)
        if num_got:
            state.num_announced = num_announced - num_got

    def pulled(self, line: Line, num_wanted: int, num_got: int, now_s: float) -> None:
        """What a pull brought, before those that it brought are ours."""
        state = self.of(line)
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

    def pull_failed(self, line: Line) -> None:
        """Nobody knows whether there was anything."""
        self.of(line).is_pulled = False

    def doubt_others(self) -> None:
        """What others had may be in the queue again: count anew."""
        for state in self._lines.values():
            state.num_others = 0
            state.num_waiting = max(state.total - state.num_ours, state.num_announced, 0)

    # --- what follows ---

    def num_waiting(self, line: Line) -> int:
        state = self._lines.get(line)
        return 0 if state is None else state.num_waiting

    def lines(self) -> list[Line]:
        """All that are known."""
        return list(self._lines)

    def to_pull(self, tiers: Container[Tier]) -> Iterator[Pullable]:
        """Lines of these tiers that a pull may bring jobs of, unless one is under way: one job
        where a lease may have lapsed. They may be a thousand, so that nothing is looked up."""
        return (
            Pullable(line, state.num_waiting or 1, state.num_here)
            for line, state in self._lines.items()
            if (state.num_waiting or state.is_due) and not state.is_pulled and line.tier in tiers
        )

    def waiting(self) -> dict[Line, int]:
        """The lines with jobs in the queue, and how many."""
        return {line: state.num_waiting for line, state in self._lines.items() if state.num_waiting}

    def idle(self, now_s: float, for_s: float) -> list[Line]:
        """Lines that have had no job for so long."""
        return [
            line
            for line, state in self._lines.items()
            if state.idle_since_s is not None and now_s - state.idle_since_s >= for_s
        ]

    def forget(self, line: Line) -> None:
        """Unless it has got jobs just now."""
        state = self._lines.get(line)
        if state is not None and not (state.num_ours or state.num_waiting or state.is_pulled):
            del self._lines[line]

    def of(self, line: Line) -> TenantQueueCounts:
        """What is known of a line, from now on if nothing was."""
        state = self._lines.get(line)
        if state is None:
            state = self._lines[line] = TenantQueueCounts()
        return state
