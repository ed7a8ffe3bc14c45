"""A generation's phase, times, lease, the delivery of its frames, and how it ends."""

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
    """How a generation ended; one for each terminal frame that a worker sends."""

    status: Status
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_message: str = ""

    @property
    def cancel_reason(self) -> str:
        """What the terminal frame of a cancelled request says beside that."""
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
    """The end of a request that was cancelled for ``reason``."""
    match reason:
        case CancelReason.DEADLINE:
            return EXPIRED
        case CancelReason.ORPHANED:
            return _ORPHANED
        case _:
            return CANCELLED


def failed(code: str, message: str) -> GenerationOutcome:
    """It could not go on; ``code`` is stable."""
    return GenerationOutcome(status=Status.FAILED, error_code=code, error_message=message)


def is_refusal(outcome: GenerationOutcome | None) -> bool:
    """Whether the request was at fault: it counts as a request, although it never ran."""
    return outcome is not None and outcome.error_code in _REFUSALS


def is_failure(outcome: GenerationOutcome | None) -> bool:
    """Whether it ended without what was asked for, and not because nobody wanted it any more."""
    return outcome is not None and outcome.status not in (Status.DONE, Status.CANCELLED)


_NS_PER_MS = 1e6
_MAX_LISTENERS = 4


class GenerationPhase(IntEnum):
    """QUEUED until the engine admits the request, PREFILLING until its first token, DECODING until
    its outcome is known, ENDED from then on. A phase may be skipped; none is entered again."""

    QUEUED = 0
    PREFILLING = 1
    DECODING = 2
    ENDED = 3


@dataclass(slots=True)
class GenerationTiming:
    """UTC epoch in ns; 0 for what has not happened. ``dispatched_ns`` is when the scheduler sent
    the request to this worker: a later delivery that this worker continues does not change it."""

    dispatched_ns: int
    accepted_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    done_ns: int = 0
    pulled_ns: int = 0

    def note_pull(self, num_tokens: int, took_s: float) -> None:
        """The last of so many tokens of another worker was here so long after the engine had been
        asked, which is when it was accepted."""
        if num_tokens:
            self.pulled_ns = self.accepted_ns + round(took_s * 1e9)

    def answer(self, status: Status, received_ns: int, num_tokens: int) -> AnswerTimes:
        """What the client saw of a request that was received at ``received_ns`` (0: when it was
        accepted here) and got ``num_tokens`` of this attempt. The times of the first token and of
        each further one are those of this attempt."""
        since_ns = received_ns or self.accepted_ns
        decode_ms = (self.last_token_ns - self.first_token_ns) / _NS_PER_MS
        return AnswerTimes(
            status=status,
            ttft_ms=since_ms(since_ns, self.first_token_ns),
            tpot_ms=decode_ms / (num_tokens - 1) if num_tokens > 1 else 0.0,
            total_ms=since_ms(since_ns, self.done_ns),
        )


def since_ms(start_ns: int, end_ns: int) -> float:
    """0 for what never happened, and where two machines' clocks disagree."""
    return max(0.0, (end_ns - start_ns) / _NS_PER_MS) if end_ns else 0.0


@dataclass(slots=True)
class LeaseState:
    """The lease that a generation runs under and the tenant's reservation to settle. At
    ``confirmed_s``, on the monotonic clock, this worker was known to own the lease."""

    handle: str
    reservation: Reservation | None
    confirmed_s: float

    @classmethod
    def of(cls, dispatch: Dispatch, now_s: float) -> LeaseState:
        return cls(dispatch.lease, dispatch.reservation, now_s)


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """Where frames go, and how that reader wants them."""

    reply: str
    batch: bool
    as_json: bool

    def as_asked(self, replay: Replay) -> Listener:
        """The same reader, who may want them in another form than the job."""
        batch, as_json = replay.batch_frames, replay.frames_as_json
        return Listener(
            self.reply,
            self.batch if batch is None else batch,
            self.as_json if as_json is None else as_json,
        )


@dataclass(slots=True)
class FrameDelivery:
    """Who gets the frames; ``num_flushed`` tokens have been posted, and what goes before them."""

    num_flushed: int
    listeners: tuple[Listener, ...] = ()
    pre_token_flushed: bool = False

    def add(self, listener: Listener) -> None:
        """Post later frames to this one too; of many the first and the newest stay."""
        if listener in self.listeners:
            return
        if len(self.listeners) == _MAX_LISTENERS:
            self.listeners = (self.listeners[0], *self.listeners[2:])
        self.listeners = (*self.listeners, listener)

    def rewind(self, num_tokens: int) -> None:
        """Post again what comes behind ``num_tokens`` tokens."""
        self.num_flushed = min(self.num_flushed, num_tokens)
        self.pre_token_flushed = False
