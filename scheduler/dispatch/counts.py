"""What became of dispatches and attempts, counted where it happens and read at a scrape."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from millrace.runtime.histogram import FIRST_TOKEN_S, STEP_S, Histogram
from millrace.schemas.jobs import Tier


class Rerun(StrEnum):
    """Why a job that ran leaves its worker for another."""

    MOVED = "moved"  # the worker drains, and another has capacity
    LOST = "lost"  # the worker is gone without a word, or did not answer
    RETURNED = "returned"  # the worker gave it back


class DispatchCounts:
    """``dispatches`` by what became of them; ``queue_s`` is from a request's receipt until a worker
    took it the first time, ``dispatch_s`` how long workers took to answer a dispatch. ``moves`` are
    the streams that were moved, by how the next worker got their context: ``pulled`` or
    ``computed``."""

    def __init__(self) -> None:
        self.dispatches: Counter[str] = Counter()
        self.reruns: Counter[Rerun] = Counter()
        self.moves: Counter[str] = Counter()
        self.queue_s = {tier: Histogram(FIRST_TOKEN_S) for tier in Tier}
        self.dispatch_s = Histogram(STEP_S)
