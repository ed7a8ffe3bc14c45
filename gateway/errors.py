"""Errors in OpenAI's shape, for every kind of failure that a caller may get."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from millrace.schemas.control import CancelReason
from millrace.schemas.errors import (
    BusUnavailableError,
    ContextLengthError,
    GrammarError,
    KVCapacityError,
    MillraceError,
    ModelNotFoundError,
    ParameterError,
    PayloadTooLargeError,
    QueueFullError,
)
from millrace.schemas.frames import Cancelled, Done, Expired, Shed, TerminalFrame
from millrace.schemas.openai import ErrorBody, ErrorInfo

_NO_RETRY_HINT_S = 1.0
_BODY_TIMEOUT = 408  # the next try may have a better connection


class NotFoundError(MillraceError, code="not_found", http_status=404):
    """Request to an unknown path."""


class MethodNotAllowedError(MillraceError, code="method_not_allowed", http_status=405):
    """Method that the path does not take; ``headers`` list the allowed methods."""

    def __init__(self, path: str, method: str, allowed: Iterable[str]) -> None:
        methods = ", ".join(sorted(allowed))
        super().__init__(f"{path} takes {methods}, not {method}.")
        self.headers = [(b"allow", methods.encode())]


class UpgradeRequiredError(MillraceError, code="upgrade_required", http_status=426):
    """Request to a WebSocket's path without its handshake."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is a WebSocket: connect with its handshake, not with a plain GET."
        )
        self.headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")]


class MediaTypeError(MillraceError, code="unsupported_media_type", http_status=415):
    """Body with a media type other than JSON."""


class SlowRequestError(MillraceError, code="request_timeout", http_status=408):
    """Body that did not arrive in time."""


class DrainingError(MillraceError, code="draining", retryable=True, http_status=503):
    """Request to a gateway that is shutting down."""

    def __init__(self) -> None:
        super().__init__("This gateway is shutting down. Send the request again.")


class InternalError(MillraceError):
    """Bug in this gateway; the log has the details."""


class TelemetryUnavailableError(
    MillraceError, code="telemetry_unavailable", retryable=True, http_status=503
):
    """Query that the telemetry process does not answer."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Error for a caller: the same for HTTP, for an error inside a stream and for WebSocket.

    ``limit`` names the limit that was reached, for our records. ``comes_back``: a client that waits
    ``retry_after_s`` within its call is served then.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    comes_back: bool = True
    more_headers: tuple[tuple[bytes, bytes], ...] = ()
    limit: str = ""

    _TYPES: ClassVar[dict[int, str]] = {
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
    }

    @property
    def body(self) -> bytes:
        """Return the error as a JSON object in OpenAI's shape."""
        kind = self._TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        info = ErrorInfo(message=self.message, type=kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(error=info))

    @property
    def should_retry(self) -> bool | None:
        """Return whether the same request may succeed soon; None if unknown."""
        if self.retry_after_s is not None:
            return self.comes_back
        return None if self.status >= 500 or self.status == _BODY_TIMEOUT else False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer. ``x-should-retry`` controls the retries of OpenAI's and
        Anthropic's SDKs, which otherwise go by the status.
        """
        headers = list(self.more_headers)
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


GOING_AWAY_REFUSAL = Refusal(
    status=503,
    code="gateway_restarting",
    message=(
        "This gateway shuts down, but the answer goes on: send the request again with the "
        "Last-Event-ID of the last event, or with its Idempotency-Key."
    ),
    retry_after_s=_NO_RETRY_HINT_S,
)


def refusal_of(error: MillraceError) -> Refusal:
    """Return the refusal for ``error``, with its ``param``, ``retry_after_s`` and ``headers``, if
    it has any.
    """
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None and error.retryable:
        retry_after_s = _NO_RETRY_HINT_S
    param = "model" if isinstance(error, ModelNotFoundError) else getattr(error, "param", None)
    # ``param`` is empty if the body as a whole is invalid.
    return Refusal(
        status=error.http_status,
        code=error.code,
        message=error.message,
        param=param or None,
        retry_after_s=retry_after_s,
        comes_back=getattr(error, "comes_back", True),
        more_headers=tuple(getattr(error, "headers", ())),
        limit=getattr(error, "limit", ""),
    )


def refusal_of_end(frame: TerminalFrame, form_field: str = "") -> Refusal:
    """Return the refusal for an accepted request that ended without ``Done``. ``form_field`` is the
    field that demands a format of the answer.
    """
    assert not isinstance(frame, Done)
    if isinstance(frame, Shed):
        return Refusal(
            status=429,
            code=frame.code or "overloaded",
            message="Too many requests wait for this model. Try again later.",
            retry_after_s=frame.retry_after_s,
        )
    if isinstance(frame, Expired):
        return Refusal(
            status=504,
            code="deadline_exceeded",
            message="The request's deadline passed before the answer was complete.",
        )
    if isinstance(frame, Cancelled) and frame.reason == CancelReason.ORPHANED.value:
        return Refusal(
            status=410,
            code=frame.reason,
            message="The gateway that had this request was gone, and no client came back for the "
            "answer in time (gateway.orphan_grace_s), so it was cancelled. Send the request again "
            "as a new one.",
        )
    if isinstance(frame, Cancelled):
        return Refusal(status=409, code="cancelled", message="The request was cancelled.")
    status = _STATUS_BY_CODE.get(frame.code, 503 if frame.retryable else 500)
    return Refusal(
        status=status,
        code=frame.code,
        message=frame.message,
        param=form_field or None if frame.code == GrammarError.code else None,
        retry_after_s=_NO_RETRY_HINT_S if frame.retryable else None,
    )


_STATUS_BY_CODE = {
    kind.code: kind.http_status
    for kind in (
        BusUnavailableError,
        ContextLengthError,
        GrammarError,
        KVCapacityError,
        ParameterError,
        PayloadTooLargeError,
        QueueFullError,
    )
} | {
    "request_timeout": 504,
    "taken_over": 409,
    "invalid_api_key": 401,
    # The model existed when the request was accepted.
    ModelNotFoundError.code: 503,
}
