"""Which request killed a worker, if one did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

MAX_FAILURES = 2.0
_SURE, _UNSURE = 1.0, 0.5


@dataclass(slots=True, eq=False)
class PoisonSuspicion:
    """Of one job: ``failures`` are the deaths of workers that it is suspected of, ``detector`` the
    one that looks into the last of them. ``outlived_engine``: an engine died under it, and nobody
    knows of a token that it has made since."""

    failures: float = 0.0
    detector: PoisonPillDetector | None = None
    outlived_engine: bool = False


class PoisonPillDetector:
    """Looks into the death of one worker: how far each request got that it held.

    A request whose client got nothing new from that run is a suspect. The only suspect has a
    failure, each of several has half a failure; a request with two failures is a poison pill.
    Whoever got further is cleared of all, so that requests which merely live through the deaths of
    workers are not blamed.
    """

    def __init__(self, suspicions: Iterable[PoisonSuspicion]) -> None:
        self.closed = asyncio.Event()
        self._pending = set(suspicions)
        self._suspects: list[PoisonSuspicion] = []
        for suspicion in self._pending:
            if suspicion.detector is not None:
                suspicion.detector.report(suspicion, progressed=True)
            suspicion.detector = self
        self._close_if_all_reported()

    def report(self, suspicion: PoisonSuspicion, *, progressed: bool) -> None:
        """Whether the client of one had new tokens of the run that died. One that is over, or of
        which nobody knows, counts as having progressed."""
        if suspicion not in self._pending:
            return
        self._pending.remove(suspicion)
        suspicion.detector = None
        if progressed:
            suspicion.failures = 0.0
        else:
            self._suspects.append(suspicion)
        self._close_if_all_reported()

    def _close_if_all_reported(self) -> None:
        if self._pending:
            return
        for suspicion in self._suspects:
            suspicion.failures += _SURE if len(self._suspects) == 1 else _UNSURE
        self._suspects = []
        self.closed.set()
