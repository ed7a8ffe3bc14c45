"""Terminal statuses of jobs that no worker ends: frame, recorded status and code."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from millrace.bus.tenancy.errors import RATE_LIMIT_ERRORS, RateLimitError
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import (
    ContextLengthError,
    MalformedMessageError,
    MillraceError,
    ParameterError,
)
from millrace.schemas.frames import Cancelled, Expired, Failed, Shed, TerminalFrame
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status

_RETRY_OVER_LIMIT_S = 5.0
_WITH_PARAM = (ParameterError, ContextLengthError, MalformedMessageError)


class TerminalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Terminal status of a job that ends without a worker.

    ``retryable`` and ``retry_after_s`` are for the client. ``limit`` is the tenant's limit that was
    reached, ``param`` the invalid field; empty if neither is the reason.
    """

    status: Status
    code: str = ""
    message: str = ""
    retryable: bool = False
    retry_after_s: float = 0.0
    limit: str = ""
    param: str = ""

    def frame(self, epoch: int) -> TerminalFrame:
        match self.status:
            case Status.CANCELLED:
                reason = self.code if self.code == CancelReason.ORPHANED.value else ""
                return Cancelled(epoch=epoch, reason=reason)
            case Status.EXPIRED:
                return Expired(epoch=epoch)
            case Status.SHED:
                return Shed(
                    epoch=epoch,
                    retry_after_s=self.retry_after_s,
                    code=self.code,
                    limit=self.limit,
                    message=self.message if self.limit else "",
                )
            case _:
                return Failed(
                    epoch=epoch,
                    code=self.code,
                    message=self.message,
                    retryable=self.retryable,
                    param=self.param,
                )


EXPIRED = TerminalStatus(
    status=Status.EXPIRED, code="deadline_exceeded", message="The deadline passed before the end."
)


REPEATED = TerminalStatus(
    status=Status.FAILED,
    code="duplicate",
    message="Another job has this request_id: it waits, runs, or has ended, perhaps refused. "
    "This one was not run. Publish it under a request_id of its own.",
)


def cancelled(reason: CancelReason) -> TerminalStatus:
    """Return the status of a cancelled job."""
    if reason is CancelReason.DEADLINE:
        return EXPIRED
    if reason is CancelReason.ORPHANED:
        return TerminalStatus(
            status=Status.CANCELLED,
            code=reason.value,
            message="The request's gateway was gone, and no client came back for it.",
        )
    return TerminalStatus(
        status=Status.CANCELLED, code="cancelled", message="The request was cancelled."
    )


def shed(retry_after_s: float) -> TerminalStatus:
    return TerminalStatus(
        status=Status.SHED,
        code="queue_full",
        message=f"The queue is full. Try again in {retry_after_s:.1f} s.",
        retryable=True,
        retry_after_s=retry_after_s,
    )


def over_limit(error: RateLimitError) -> TerminalStatus:
    """Return the status of a job over its tenant's limit: shed if the limit renews, else failed."""
    return TerminalStatus(
        status=Status.SHED if error.comes_back else Status.FAILED,
        code=error.code,
        message=error.message,
        retryable=error.comes_back,
        retry_after_s=error.retry_after_s or 0.0,
        limit=error.limit,
    )


def over_waiting_jobs(tenant: str, tier: Tier, bound: int) -> TerminalStatus:
    """Return the status of a job whose tenant has too many published jobs waiting."""
    return TerminalStatus(
        status=Status.SHED,
        code="max_waiting_jobs",
        message=f"Limit max_waiting_jobs of tenant {tenant} reached: {bound} jobs wait in tier "
        f"{tier.value}. Publish more when some of them have ended.",
        retryable=True,
        retry_after_s=_RETRY_OVER_LIMIT_S,
        limit="max_waiting_jobs",
    )


def too_slow(predicted_s: float, bound_s: float) -> TerminalStatus:
    """Return the status of a job whose predicted TTFT is above the tier's bound."""
    return TerminalStatus(
        status=Status.SHED,
        code="overloaded",
        message=f"The first token is predicted in {predicted_s:.1f} s, later than the "
        f"{bound_s:.1f} s that this tier waits.",
        retryable=True,
        retry_after_s=max(predicted_s - bound_s, 0.5),
    )


def poison_pill() -> TerminalStatus:
    """Return the status of a job that killed its workers."""
    return TerminalStatus(
        status=Status.FAILED,
        code="poison",
        message="The workers that ran this request died before its next token, so it is not run "
        "again. Change the request before sending it again.",
    )


def refused(error: MillraceError) -> TerminalStatus:
    """Return the status of a job that is invalid or whose model cannot be served."""
    return TerminalStatus(
        status=Status.FAILED,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        param=error.param if isinstance(error, _WITH_PARAM) else "",
    )


def failed(code: str, message: str, *, retryable: bool) -> TerminalStatus:
    return TerminalStatus(status=Status.FAILED, code=code, message=message, retryable=retryable)


def _foreseen() -> Iterator[TerminalStatus]:
    yield from (EXPIRED, REPEATED, poison_pill(), shed(0.0), too_slow(0.0, 0.0))
    yield from (cancelled(reason) for reason in CancelReason)
    yield over_waiting_jobs("", Tier.FREE, 0)
    for kind in RATE_LIMIT_ERRORS.values():
        for status in (Status.SHED, Status.FAILED):
            yield TerminalStatus(status=status, code=kind.code)


# Status and code of each end that is not the job's own fault.
FORESEEN_ENDS = frozenset((one.status, one.code) for one in _foreseen())
