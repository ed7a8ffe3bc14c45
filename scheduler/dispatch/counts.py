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


class DispatchResult(StrEnum):
    """The result of a dispatch, by its metric label."""

    ACCEPTED = "accepted"  # the worker holds the lease
    REFUSED = "refused"  # nothing ran: another worker, or later
    LOST = "lost"  # no answer: it may run there
    ANSWERED = "answered"  # an earlier attempt had ended it already
    SUPERSEDED = "overtaken"  # somebody else runs it at a higher epoch
    POISON_PILL = "poisonous"  # workers die of it
    UNSENT = "unsent"  # the message bus was away
    MUST_END = "ends"  # it must not run: see the terminal status


class MovedBy(StrEnum):
    """How the next worker gets the context of a stream that was moved."""

    PULLED = "pulled"
    COMPUTED = "computed"


class DispatchCounts:
    """``dispatches`` by what became of them; ``queue_s`` is from a
    request's receipt until a worker took it the first time, ``dispatch_s`` how long workers took to
    answer a dispatch. ``moves`` are the streams that were moved."""

    def __init__(self) -> None:
        self.dispatches: Counter[DispatchResult] = Counter()
        self.reruns: Counter[Rerun] = Counter()
        self.moves: Counter[MovedBy] = Counter()
        self.queue_s = {tier: Histogram(FIRST_TOKEN_S) for tier in Tier}
        self.dispatch_s = Histogram(STEP_S)
