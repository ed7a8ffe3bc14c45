"""Which request killed a worker, if one did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler.jobs.entry import Entry

MAX_STRIKES = 2.0
_SURE, _UNSURE = 1.0, 0.5


class Inquest:
    """On the death of one worker: what each request that it held had come to.

    A request whose client got nothing new from that run is a suspect; the only one has a strike,
    one of several half a strike. With two strikes a request is given up on. Whoever got further is
    cleared of all, so that requests which merely live through the deaths of workers are not blamed.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.closed = asyncio.Event()
        self._pending = set(entries)
        self._suspects: list[Entry] = []
        for entry in self._pending:
            if entry.inquest is not None:
                entry.inquest.report(entry, progressed=True)
            entry.inquest = self
        self._close_if_all_spoke()

    def report(self, entry: Entry, *, progressed: bool) -> None:
        """What became of one: whether its client had new tokens of the run that died. One that is
        over, or of which nobody knows, counts as having progressed."""
        if entry not in self._pending:
            return
        self._pending.remove(entry)
        entry.inquest = None
        if progressed:
            entry.strikes = 0.0
        else:
            self._suspects.append(entry)
        self._close_if_all_spoke()

    def _close_if_all_spoke(self) -> None:
        if self._pending:
            return
        for entry in self._suspects:
            entry.strikes += _SURE if len(self._suspects) == 1 else _UNSURE
        self._suspects = []
        self.closed.set()
