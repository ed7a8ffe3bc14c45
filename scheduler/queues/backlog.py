"""Where the jobs of one model wait: line by line, in the queue and here."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bus.api import Line
from schemas.jobs import Tier

if TYPE_CHECKING:
    from scheduler.jobs.entry import Entry

# All jobs of a line seem to be held: a lease may have lapsed, so it is tried now and then.
_TRY_AGAIN_S = 1.0


@dataclass(slots=True)
class _State:
    """``num_waiting`` jobs are thought to be in the queue for whoever pulls, of which ``num_told``
    were heard of since the last pull, less than none if a pull that waited was faster than the
    news; ``num_others`` were not found by that, so other schedulers and their workers have them.
    ``num_here`` were pulled and not sent."""

    num_waiting: int = 0
    num_told: int = 0
    num_told_before: int = 0
    num_here: int = 0
    num_ours: int = 0
    num_others: int = 0
    total: int = 0
    is_pulled: bool = False
    pulled_s: float = 0.0
    is_due: bool = False
    idle_since_s: float | None = None


class Pullable(NamedTuple):
    """A line of which ``num_to_pull`` jobs may be in the queue, and ``num_here`` wait here."""

    line: Line
    num_to_pull: int
    num_here: int


class Backlog:
    """What is known of the lines of one model. Pure: the caller passes the time in.

    ``published`` is the news, which may be lost, ``counted`` the truth now and then.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, _State] = {}

    def __len__(self) -> int:
        return len(self._lines)

    # --- what is heard of the queue ---

    def published(self, line: Line) -> bool:
        """Whether there is something to pull that nobody waits for."""
        state = self._of(line)
        state.num_told += 1
        if state.num_told <= 0:
            return False
        state.num_waiting += 1
        return not state.is_pulled

    def counted(self, totals: Mapping[Line, int], now_s: float) -> None:
        """How many jobs each line has, whoever holds them; lines that are left out have none."""
        for line in totals:
            self._of(line)
        for line, state in self._lines.items():
            state.total = totals.get(line, 0)
            # What was stored after the count is told, but not in it.
            found = state.total - state.num_ours - state.num_others
            state.num_told = max(0, state.num_told)
            state.num_waiting = max(found, state.num_told, 0)
            state.is_due = bool(state.total) and now_s - state.pulled_s >= _TRY_AGAIN_S
            if state.total or state.num_ours:
                state.idle_since_s = None
            elif state.idle_since_s is None:
                state.idle_since_s = now_s

    def pulling(self, line: Line) -> None:
        """A pull begins; it may miss what is told from now on."""
        state = self._of(line)
        state.is_pulled = True
        state.num_told_before = state.num_told

    def waited(self, line: Line, num_got: int, now_s: float) -> None:
        """What a pull brought that was out before the job, before that is ours. The news of it may
        come later."""
        state = self._of(line)
        num_told = state.num_told
        self.pulled(line, num_got, num_got, now_s)
        if num_got:
            state.num_told = num_told - num_got

    def pulled(self, line: Line, num_wanted: int, num_got: int, now_s: float) -> None:
        """What a pull brought, before those that it brought are ours."""
        state = self._of(line)
        state.is_pulled = state.is_due = False
        state.pulled_s = now_s
        if num_got and not state.num_waiting:
            # All seemed to be others', and here is one: count anew.
            state.num_others = 0
        state.num_told = max(0, state.num_told - (num_got or state.num_told_before))
        state.num_waiting = max(0, state.num_waiting - num_got)
        if not num_got:
            state.num_waiting = state.num_told
            state.num_others = max(0, state.total - state.num_ours)
        elif num_got < num_wanted and state.num_waiting:
            # More may have come meanwhile: the next pull tells.
            state.num_waiting = max(1, state.num_waiting)

    def pull_failed(self, line: Line) -> None:
        """Nobody knows whether there was anything."""
        self._of(line).is_pulled = False

    def doubt_others(self) -> None:
        """What others had may be in the queue again: count anew."""
        for state in self._lines.values():
            state.num_others = 0
            state.num_waiting = max(state.total - state.num_ours, state.num_told, 0)

    # --- what becomes of ours ---

    def took(self, entry: Entry) -> None:
        """It is ours from now on, to answer for."""
        self._of(entry.line).num_ours += 1

    def dropped(self, entry: Entry) -> None:
        self._of(entry.line).num_ours -= 1

    def waits_here(self, entry: Entry) -> None:
        """It was pulled, or taken back from a worker."""
        if not entry.waits_here:
            entry.waits_here = True
            self._of(entry.line).num_here += 1

    def left(self, entry: Entry) -> None:
        """It was sent, or is over."""
        if entry.waits_here:
            entry.waits_here = False
            self._of(entry.line).num_here -= 1

    # --- what follows ---

    def num_here(self, line: Line) -> int:
        return self._of(line).num_here

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

    def _of(self, line: Line) -> _State:
        state = self._lines.get(line)
        if state is None:
            state = self._lines[line] = _State()
        return state
