"""Bare ASGI for JSON endpoints on the token path: bounded bodies in, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from millrace.gateway.errors import MediaTypeError, Refusal, SlowRequestError
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, ParameterError, PayloadTooLargeError
from millrace.schemas.notices import NOTICE_NAME, Notices, header_value

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
# Keys of a request's scope: its caller, once known, and whether it is a job by now.
CALLER = "millrace.caller"
ACCEPTED = "millrace.accepted"
REFUSED = "millrace.refused"
# Converter of refusals for clients of that path, if not OpenAI's shape.
SHAPED = "millrace.shaped"
JSON = (b"content-type", b"application/json")
_HANDSHAKE_RESPONSE = "websocket.http.response"  # the name of an extension of ASGI
# Content types without meaning: curl sends the latter with any data.
_TAKEN_AS_JSON = frozenset({"", "application/x-www-form-urlencoded"})
_LINGER_S = 2.0
_LINGER_BYTES = 64 * 1024 * 1024
_NAME = b"x-request-id"
_OWN_NAME = b"x-millrace-request-id"
_FORM = re.compile(r"[\x21-\x7e]{1,128}")


class BodyDeadline:
    """Deadline of a body: ``body_timeout_s`` after its head, plus the time of its bytes at
    ``body_bytes_per_s``; at most ``body_timeout_s`` of silence. Times are of one monotonic clock.
    """

    def __init__(self, config: GatewayConfig, begun_s: float) -> None:
        self._timeout_s = config.body_timeout_s
        self._bytes_per_s = config.body_bytes_per_s
        self._begun_s = begun_s

    def at_s(self, num_bytes: int, now_s: float) -> float:
        """Return the time by which more than ``num_bytes`` must have come."""
        whole_s = self._begun_s + self._timeout_s + num_bytes / self._bytes_per_s
        return min(whole_s, now_s + self._timeout_s)

    def error(self, num_bytes: int) -> SlowRequestError:
        return SlowRequestError(
            f"The body came too slowly: {num_bytes} bytes of it. It may take {self._timeout_s:g} s "
            f"and a second more for each {self._bytes_per_s} bytes."
        )


class ClientLeftError(Exception):
    """Close of the connection by the client before its request was complete."""


def new_request_id(prefix: str) -> str:
    """Return an id that is valid in subjects and headers: ``prefix`` and 96 random bits."""
    return f"{prefix}-{secrets.token_hex(12)}"


def request_id_header(request_id: str) -> tuple[bytes, bytes]:
    return (b"x-request-id", request_id.encode())


async def read_body(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes:
    """Read the whole body, of at most ``max_body_bytes``.

    Raises PayloadTooLargeError as soon as more than the limit is declared or has come,
    SlowRequestError if it takes too long, ParameterError for a bad Content-Length, MediaTypeError
    for a content type other than JSON, and ClientLeftError.
    """
    limit_bytes = config.max_body_bytes
    declared_bytes = content_length(scope)
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise PayloadTooLargeError(declared_bytes, limit_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    now_s = asyncio.get_running_loop().time
    deadline = BodyDeadline(config, now_s())
    try:
        async with asyncio.timeout_at(deadline.at_s(0, now_s())) as timeout:
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientLeftError
                chunk = event.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes > limit_bytes:
                    raise PayloadTooLargeError(num_bytes, limit_bytes)
                chunks.append(chunk)
                if not event.get("more_body", False):
                    _check_media_type(scope)
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                timeout.reschedule(deadline.at_s(num_bytes, now_s()))
    except TimeoutError:
        raise deadline.error(num_bytes) from None


def _check_media_type(scope: Scope) -> None:
    given = header_of(scope, b"content-type") or ""
    kind = given.partition(";")[0].strip().lower()
    if kind in _TAKEN_AS_JSON or kind.endswith(("/json", "+json")):
        return
    raise MediaTypeError(f"The body must be application/json, not {kind:.100}.")


def content_length(scope: Scope) -> int | None:
    """Return the declared length. Raises ParameterError unless it is a number."""
    declared = header_of(scope, b"content-length")
    if declared is not None and not (declared.isascii() and declared.isdigit()):
        raise ParameterError("content-length", "content-length must be a number")
    return None if declared is None else int(declared)


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request's header (``name`` in lower case), if present."""
    for known, value in scope["headers"]:
        if known == name:
            text: str = value.decode("latin-1")
            return text
    return None


def json_response(value: object, status: int = 200, encoded: bytes = b"") -> Response:
    """Return a Starlette response with a value as JSON, and a header with its ``notices``, if it
    has any. ``encoded`` is its JSON, if available.
    """
    notices: Notices = getattr(value, "notices", None) or ()
    headers = {NOTICE_NAME: header_value(notices).decode()} if notices else None
    body = encoded or msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


async def send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole response of a known length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal, request_id: str) -> None:
    headers = [JSON, request_id_header(request_id), *refusal.headers]
    await send_response(send, refusal.status, headers, refusal.body)


async def refuse_handshake(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Refuse a WebSocket handshake. A server without the response extension answers 403."""
    if _HANDSHAKE_RESPONSE not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    start = {"status": refusal.status, "headers": [JSON, *refusal.headers]}
    await send({"type": f"{_HANDSHAKE_RESPONSE}.start", **start})
    await send({"type": f"{_HANDSHAKE_RESPONSE}.body", "body": refusal.body})


async def refuse_and_close(
    receive: Receive, send: Send, refusal: Refusal, more_headers: Headers | None = None
) -> None:
    """Refuse a request whose body was not read to its end, and close the connection.

    Closing at once would reset the connection before the client reads the answer, so the rest of
    the body is discarded for a moment.
    """
    body = refusal.body
    headers = [
        JSON,
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *refusal.headers,
        *(more_headers or ()),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    num_bytes = 0
    # The rest of the body may not fit its Content-Encoding.
    with contextlib.suppress(TimeoutError, MillraceError):
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                event = await receive()
                if event["type"] == "http.disconnect" or not event.get("more_body", False):
                    break
                num_bytes += len(event.get("body", b""))
    await send({"type": "http.response.body", "body": b""})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """Middleware that answers with a client's ``X-Request-Id`` of 1 to 128 visible ASCII
    characters, and with our own id beside it: a client may use one id twice, and everything here is
    keyed by ours. Without such an id, ours is ``X-Request-Id``.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header_of(scope, _NAME) if scope["type"] == "http" else None
        if given is None or not _FORM.fullmatch(given):
            await self._app(scope, receive, send)
            return

        await self._app(scope, receive, with_headers(send, partial(_headers_with, given)))


def with_headers(send: Send, change: Callable[[Headers], Headers]) -> Send:
    """Return a ``send`` that replaces a response's headers by ``change`` of them."""

    async def send_changed(event: Event) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": change(event["headers"])}
        await send(event)

    return send_changed


def with_id_also_as(name: bytes, send: Send) -> Send:
    """Return a ``send`` that adds our own id in a header of that name."""
    return with_headers(
        send,
        lambda own: [*own, *((name, value) for known, value in own if known == _NAME)],
    )


def _headers_with(given: str, headers: Headers) -> Headers:
    """Return the headers of an answer with our id under its other name and the client's in its
    place.
    """
    renamed = [(_OWN_NAME if name.lower() == _NAME else name, value) for name, value in headers]
    return [*renamed, request_id_header(given)]
