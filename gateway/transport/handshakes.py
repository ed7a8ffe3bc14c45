"""Refuses WebSocket handshakes that are not valid, in the form of all other refusals."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader
from websockets.http11 import Response
from websockets.server import ServerProtocol

from millrace.gateway.errors import Refusal
from millrace.gateway.transport.http import JSON, new_request_id, request_id_header

_VERSION_HEADER = "Sec-WebSocket-Version"
_CODES = {414: "uri_too_long", 431: "request_header_fields_too_large"}

# Has a refusal counted; its caller is not known.
Note = Callable[[Refusal, None], None]


class HandshakeProtocol(ServerProtocol):
    """The WebSocket protocol of one connection. ``note`` is told of each refusal."""

    def __init__(self, note: Note, **options: Any) -> None:
        super().__init__(**options)
        self._note = note

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        """The response to a handshake: ``text`` as it is, unless the handshake is not valid."""
        error = self.handshake_exc
        if error is None:
            return super().reject(status, text)
        refusal = _refusal_of(error, HTTPStatus(status).value)
        self._note(refusal, None)
        body = refusal.body
        lines = [
            JSON,
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            request_id_header(new_request_id("req")),
            *refusal.headers,
        ]
        headers = Headers([(name.decode(), value.decode()) for name, value in lines])
        return Response(refusal.status, HTTPStatus(refusal.status).phrase, headers, body)


def _refusal_of(error: Exception, status: int) -> Refusal:
    header = error.name if isinstance(error, InvalidHeader) else ""
    param = header.lower() or None
    if header == _VERSION_HEADER:
        return Refusal(
            status=HTTPStatus.UPGRADE_REQUIRED.value,
            code="upgrade_required",
            message=f"This WebSocket speaks version 13 only: send {_VERSION_HEADER}: 13.",
            param=param,
            more_headers=((b"sec-websocket-version", b"13"), (b"upgrade", b"websocket")),
        )
    message = f"The WebSocket handshake is not valid: {error!s:.200}."
    code = _CODES.get(status, "invalid_handshake")
    return Refusal(status=status, code=code, message=message, param=param)
