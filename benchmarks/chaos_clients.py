"""Clients of ``benchmarks.chaos``: each asks one question over as many connections as it takes, and
notes when tokens came."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from tests.e2e.clients import Answer
from tests.e2e.resuming import EventClient, Persistent, SocketClient
from tests.support.system import System


class Arrivals:
    """When the parts of one answer came, on this process's monotonic clock."""

    def __init__(self) -> None:
        self.parts_s: list[float] = []

    def note(self) -> None:
        self.parts_s.append(time.monotonic())

    def longest_gap_s(self, from_s: float, to_s: float) -> float | None:
        """The longest silence that had not ended at ``from_s`` and began before ``to_s``; None for
        a stream that had not begun by then, or was over."""
        gaps = [
            after_s - before_s
            for before_s, after_s in pairwise(self.parts_s)
            if after_s > from_s and before_s < to_s
        ]
        has_begun = bool(self.parts_s) and self.parts_s[0] < from_s
        return max(gaps) if gaps and has_begun else None


class TimedSocket(SocketClient):
    """By WebSocket; it goes on by the index of the first token that it has not got."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self.arrivals = Arrivals()

    def _read(self, message: dict[str, Any]) -> Answer | None:
        if message["type"] == "delta":
            self.arrivals.note()
        return super()._read(message)


class TimedEvents(EventClient):
    """By server-sent events; it goes on by Last-Event-ID."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self.arrivals = Arrivals()

    def _note(self, event_id: str) -> None:
        self.arrivals.note()
        super()._note(event_id)


TimedClient = TimedSocket | TimedEvents
KINDS: tuple[type[TimedSocket] | type[TimedEvents], ...] = (TimedSocket, TimedEvents)

__all__ = ["KINDS", "Answer", "Arrivals", "Persistent", "TimedClient"]
