"""An open stream's phase, the news of it that must be asked for, and what its client saw."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from millrace.schemas.control import CancelReason
from millrace.schemas.records import STALL_MS

_STALL_S = STALL_MS / 1e3
_UNDER_STALL_S = math.nextafter(_STALL_S, 0.0)


class Phase(IntEnum):
    """Who is at the far end. DETACHED may be skipped; none is entered again, as whoever comes back
    gets a stream of its own."""

    ATTACHED = 0  # a client takes what comes
    DETACHED = 1  # nobody is connected, and somebody may go on with it
    ABORTED = 2  # the client wants nothing more, and only the end is awaited


class Cancellation(NamedTuple):
    """It was asked for; whoever runs the job is not waited for after ``give_up_s`` (monotonic)."""

    reason: CancelReason
    give_up_s: float


@dataclass(slots=True)
class ReplayState:
    """``is_needed`` once frames may have been missed. Of a stream that ``is_foreign`` they go to
    another gateway that lives, so that each news of it has to be asked for. No question is put
    while one ``is_asked``, nor before ``not_before_s`` (monotonic). ``num_fruitless`` workers in a
    row said that they send what is missing from ``from_index`` on, which the client still lacks;
    the first of them at ``fruitless_since_s``. ``over_since_s`` is when
    the request was found to be over while its end is missing here; None: not found to be over."""

    is_needed: bool = False
    is_foreign: bool = False
    is_asked: bool = False
    not_before_s: float = 0.0
    from_index: int = -1
    num_fruitless: int = 0
    fruitless_since_s: float = 0.0
    over_since_s: float | None = None

    def note_answer(self, next_index: int, now_s: float) -> None:
        """A worker sends what is missing from ``next_index`` on."""
        self.over_since_s = None
        if next_index == self.from_index:
            self.num_fruitless += 1
            return
        self.from_index = next_index
        self.num_fruitless, self.fruitless_since_s = 0, now_s


@dataclass(slots=True)
class DeliveryFigures:
    """What the client saw over all connections that it had, in the terms of ``DeliveryRecord``:
    from ``received_s`` (monotonic), which may be before this gateway was asked, to
    ``last_token_s``, and for ``intake_s`` before that. ``num_delivered`` are only the tokens that
    were given out here."""

    received_s: float
    intake_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_delivered: int = 0
    num_replays: int = 0
    num_resumes: int = 0
    num_stalls: int = 0
    stalled_s: float = 0.0
    longest_gap_s: float = 0.0
    unnoted_gap_s: float = 0.0

    def note_gap(self, gap_s: float) -> None:
        """Take in a gap between two deliveries. One of up to ``unnoted_gap_s`` changes nothing,
        which spares most tokens the call."""
        is_stall = gap_s >= _STALL_S
        self.count_gaps_on(
            self.num_stalls + is_stall,
            self.stalled_s + (gap_s if is_stall else 0.0),
            max(self.longest_gap_s, gap_s),
        )

    def count_gaps_on(self, num_stalls: int, stalled_s: float, longest_gap_s: float) -> None:
        """So much there was until now."""
        self.num_stalls = num_stalls
        self.stalled_s = stalled_s
        self.longest_gap_s = longest_gap_s
        self.unnoted_gap_s = min(longest_gap_s, _UNDER_STALL_S)
