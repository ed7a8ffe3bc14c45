"""Phase, times, lease, frame delivery and outcome of a generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import msgspec

from millrace.schemas.control import AnswerTimes, CancelReason, Dispatch, Replay, Reservation
from millrace.schemas.errors import (
    ContextLengthError,
    GrammarError,
    KVCapacityError,
    ParameterError,
)
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import Status


class GenerationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a generation; there is one for each terminal frame that a worker sends."""

    status: Status
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_message: str = ""

    @property
    def cancel_reason(self) -> str:
        """Reason that the terminal frame of a cancelled request gives; empty for a plain cancel."""
        is_orphaned = self.error_code == CancelReason.ORPHANED.value
        return self.error_code if is_orphaned else ""


_REFUSALS = frozenset(
    kind.code for kind in (ContextLengthError, GrammarError, KVCapacityError, ParameterError)
)
STOPPED = GenerationOutcome(status=Status.DONE, finish_reason=FinishReason.STOP)
LENGTH_REACHED = GenerationOutcome(status=Status.DONE, finish_reason=FinishReason.LENGTH)
CANCELLED = GenerationOutcome(
    status=Status.CANCELLED, error_code="cancelled", error_message="The request was cancelled."
)
EXPIRED = GenerationOutcome(
    status=Status.EXPIRED,
    error_code="deadline_exceeded",
    error_message="The deadline passed before the end.",
)
_ORPHANED = GenerationOutcome(
    status=Status.CANCELLED,
    error_code=CancelReason.ORPHANED.value,
    error_message="The request's gateway was gone, and no client came back for it.",
)


def cancelled(reason: CancelReason) -> GenerationOutcome:
    """Return the outcome of a request that was cancelled for ``reason``."""
    match reason:
        case CancelReason.DEADLINE:
            return EXPIRED
        case CancelReason.ORPHANED:
            return _ORPHANED
        case _:
            return CANCELLED


def failed(code: str, message: str) -> GenerationOutcome:
    """Return the outcome of a request that failed; ``code`` is stable."""
    return GenerationOutcome(status=Status.FAILED, error_code=code, error_message=message)


def is_refusal(outcome: GenerationOutcome | None) -> bool:
    """Return whether the request was at fault. Such a request counts as a request although it never
    ran.
    """
    return outcome is not None and outcome.error_code in _REFUSALS


def is_failure(outcome: GenerationOutcome | None) -> bool:
    """Return whether a request ended without its answer and was not cancelled."""
    return outcome is not None and outcome.status not in (Status.DONE, Status.CANCELLED)


_NS_PER_MS = 1e6
_MAX_LISTENERS = 4


class GenerationPhase(IntEnum):
    """Phase of a generation.

    QUEUED until the engine admits the request, PREFILLING until its first token, DECODING until its
    outcome is known, ENDED from then on. A phase may be skipped; none is entered twice.
    """

    QUEUED = 0
    PREFILLING = 1
    DECODING = 2
    ENDED = 3


@dataclass(slots=True)
class GenerationTiming:
    """Times of a generation, in ns since the UTC epoch; 0 for an event that has not happened.

    ``dispatched_ns`` is when the scheduler sent the request to this worker. A later delivery that
    this worker continues does not change it.
    """

    dispatched_ns: int
    accepted_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    done_ns: int = 0
    pulled_ns: int = 0

    def note_pull(self, num_tokens: int, took_s: float) -> None:
        """Record when the pull of ``num_tokens`` tokens from another worker ended: ``took_s`` after
        the request was accepted here.
        """
        if num_tokens:
            self.pulled_ns = self.accepted_ns + round(took_s * 1e9)

    def answer(self, status: Status, received_ns: int, num_tokens: int) -> AnswerTimes:
        """Return the times that the client saw.

        The times of the first token and per token are those of this attempt.

        Args:
            status: the final status.
            received_ns: when the gateway received the request; 0: use the time of acceptance here.
            num_tokens: the number of tokens of this attempt.
        """
        since_ns = received_ns or self.accepted_ns
        decode_ms = (self.last_token_ns - self.first_token_ns) / _NS_PER_MS
        return AnswerTimes(
            status=status,
            ttft_ms=since_ms(since_ns, self.first_token_ns),
            tpot_ms=decode_ms / (num_tokens - 1) if num_tokens > 1 else 0.0,
            total_ms=since_ms(since_ns, self.done_ns),
        )


def since_ms(start_ns: int, end_ns: int) -> float:
    """Return the milliseconds between two times; 0 if the second never happened, and if two
    machines' clocks disagree.
    """
    return max(0.0, (end_ns - start_ns) / _NS_PER_MS) if end_ns else 0.0


@dataclass(slots=True)
class LeaseState:
    """Lease that a generation runs under, and the tenant's reservation to settle.

    At ``confirmed_s``, on the monotonic clock, this worker was known to own the lease.
    """

    handle: str
    reservation: Reservation | None
    confirmed_s: float

    @classmethod
    def of(cls, dispatch: Dispatch, now_s: float) -> LeaseState:
        return cls(dispatch.lease, dispatch.reservation, now_s)


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """Reader of frames: its address and the form that it wants."""

    reply: str
    batch: bool
    as_json: bool

    def as_asked(self, replay: Replay) -> Listener:
        """Return the same reader with the form of frames that the replay asks for."""
        batch, as_json = replay.batch_frames, replay.frames_as_json
        return Listener(
            self.reply,
            self.batch if batch is None else batch,
            self.as_json if as_json is None else as_json,
        )


@dataclass(slots=True)
class FrameDelivery:
    """Listeners of a generation. ``num_flushed`` tokens have been posted, and the frames before
    them.
    """

    num_flushed: int
    listeners: tuple[Listener, ...] = ()
    pre_token_flushed: bool = False

    def add(self, listener: Listener) -> None:
        """Post later frames to this listener too. Beyond the limit, the first and the newest
        stay.
        """
        if listener in self.listeners:
            return
        if len(self.listeners) == _MAX_LISTENERS:
            self.listeners = (self.listeners[0], *self.listeners[2:])
        self.listeners = (*self.listeners, listener)

    def rewind(self, num_tokens: int) -> None:
        """Post everything after the first ``num_tokens`` tokens again."""
        self.num_flushed = min(self.num_flushed, num_tokens)
        self.pre_token_flushed = False
