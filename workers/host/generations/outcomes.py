"""How generations end."""

from __future__ import annotations

import msgspec

from millrace.schemas.control import CancelReason
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
