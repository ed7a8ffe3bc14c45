"""Endpoint ``/v1/ws``: many requests on one socket, on bare ASGI."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from millrace.gateway.api.socket.session import KEY_REVOKED, SocketSession
from millrace.gateway.core import Gateway
from millrace.gateway.errors import Refusal, refusal_of
from millrace.gateway.request.tracing import TRACEPARENT
from millrace.gateway.tenancy.identity import Caller, token_of
from millrace.gateway.transport.connection_writer import WRITER_EXTENSION, ConnectionWriter
from millrace.gateway.transport.http import (
    CALLER,
    Receive,
    Scope,
    Send,
    header_of,
    refuse_handshake,
)
from millrace.gateway.transport.origins import is_forwarded
from millrace.registry.requests.decoding import decode
from millrace.schemas.errors import InvalidJsonError, MillraceError, ParameterError
from millrace.schemas.websocket import (
    SUBPROTOCOL,
    Authenticate,
    Authenticated,
    CancelGeneration,
    ClientMessage,
    Error,
    Generate,
    Pong,
    Resume,
)

ROUTE = "/v1/ws"
_PONG = msgspec.json.encode(Pong())
_MESSAGE_TYPES = ("authenticate", "generate", "resume", "cancel", "ping")
_KEY_WITHIN_S = 10.0
_NORMAL_CODES = (1000, 1001, 1005)
_SERVICE_RESTART, _TRY_AGAIN_LATER, _POLICY_VIOLATION = 1012, 1013, 1008
_UNAUTHENTICATED = "unauthenticated"


class WebSocketHandler:
    """ASGI handler of WebSockets: each call serves one socket until it closes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder: msgspec.json.Decoder[ClientMessage] = msgspec.json.Decoder(ClientMessage)
        self._per_address: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        address = (scope.get("client") or ("",))[0]
        try:
            caller = await self._welcome(scope, address)
        except MillraceError as error:
            refusal = refusal_of(error)
            self._gateway.metrics.count_request(ROUTE, refusal.status)
            self._gateway.refusals.note(ROUTE, refusal, scope.get(CALLER))
            await refuse_handshake(scope, send, refusal)
            return
        subprotocol = SUBPROTOCOL if scope["subprotocols"] else None
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        self._gateway.metrics.count_request(ROUTE, 101)
        self._per_address[address] += 1
        try:
            await self._serve(scope, receive, send, caller)
        finally:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    async def _welcome(self, scope: Scope, address: str) -> Caller | None:
        """Return the caller; None if the key follows in a message. Raises MillraceError for a
        refused client.
        """
        gateway = self._gateway
        offered = scope["subprotocols"]
        if offered and SUBPROTOCOL not in offered:
            raise ParameterError(
                "sec-websocket-protocol",
                f"This socket speaks the subprotocol {SUBPROTOCOL}; offer that.",
            )
        limit = gateway.config.max_sockets_per_address
        if limit and self._per_address[address] >= limit:
            raise TooManySocketsError(limit)
        if gateway.identity.demands_key_of(scope) and token_of(scope) is None:
            return None
        return await gateway.identity.caller(scope)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, caller: Caller | None
    ) -> None:
        gateway = self._gateway
        writer: ConnectionWriter = scope["extensions"][WRITER_EXTENSION]
        traceparent = None if gateway.traces is None else header_of(scope, TRACEPARENT)
        session = SocketSession(gateway, writer, caller, traceparent)
        gateway.sockets.add(session)
        if gateway.draining:
            session.announce_going_away()
        hold = True
        try:
            code = await self._read(scope, receive, session)
            hold = code not in _NORMAL_CODES
        finally:
            writer.on_writable = None
            gateway.sockets.discard(session)
            session.close(hold=hold)
        if session.dropped:
            await send(
                {
                    "type": "websocket.close",
                    "code": _CODES.get(session.dropped, _TRY_AGAIN_LATER),
                    "reason": session.dropped,
                }
            )

    async def _read(self, scope: Scope, receive: Receive, session: SocketSession) -> int:
        """Handle messages until the client leaves or is dropped; return its close code, 0 if it
        sent none.
        """
        dropped = asyncio.create_task(session.wait_dropped())
        late = asyncio.get_running_loop().call_later(_KEY_WITHIN_S, _drop_stranger, session)
        try:
            while True:
                reading = asyncio.ensure_future(receive())
                await asyncio.wait((reading, dropped), return_when=asyncio.FIRST_COMPLETED)
                if dropped.done():
                    reading.cancel()
                    return 0
                event = reading.result()
                if event["type"] == "websocket.disconnect":
                    code: int = event.get("code", 1005)
                    return code
                text = event.get("text")
                await self._handle(text if text is not None else event["bytes"], scope, session)
        finally:
            late.cancel()
            dropped.cancel()

    async def _handle(self, payload: str | bytes, scope: Scope, session: SocketSession) -> None:
        try:
            message = decode(self._decoder, payload)
        except MillraceError as error:
            session.refuse(self._malformed(payload, error, session), 400)
            return
        if isinstance(message, Authenticate):
            await self._authenticate(message, scope, session)
        elif session.caller is None:
            text = "This gateway demands an API key: send authenticate first."
            error_id = getattr(message, "id", None)
            session.refuse(Error(code="invalid_api_key", message=text, id=error_id), 401)
        elif isinstance(message, Generate):
            session.generate(message)
        elif isinstance(message, Resume):
            session.resume(message)
        elif isinstance(message, CancelGeneration):
            session.cancel(message.id)
        else:
            session.say_payload(_PONG)

    async def _authenticate(
        self, message: Authenticate, scope: Scope, session: SocketSession
    ) -> None:
        try:
            caller = await self._gateway.identity.caller_of_token(
                message.token, forwarded=is_forwarded(scope)
            )
        except MillraceError as error:
            refusal = refusal_of(error)
            session.note_refusal(refusal, caller=getattr(error, "whose", None))
            session.say(
                Error(
                    code=refusal.code,
                    message=refusal.message,
                    retry_after_s=refusal.retry_after_s,
                )
            )
            session.drop_when_said(_UNAUTHENTICATED)
            return
        session.caller = caller
        session.say(Authenticated(tenant=caller.tenant, tier=caller.tier))

    def _malformed(
        self, payload: str | bytes, error: MillraceError, session: SocketSession
    ) -> Error:
        """Return the error for a malformed message. It carries the message's id if that can be
        read, but never the id of a running request, which the error would end.
        """
        try:
            head = _head(payload)
        except InvalidJsonError as not_json:
            return Error(code=not_json.code, message=not_json.message)
        known_id = head.id if isinstance(head.id, str) and not session.runs(head.id) else None
        if head.type not in _MESSAGE_TYPES:
            text = f"type must be one of {', '.join(_MESSAGE_TYPES)}."
            return Error(code="unknown_message_type", message=text, param="type", id=known_id)
        refusal = refusal_of(error)
        return Error(code=refusal.code, message=refusal.message, param=refusal.param, id=known_id)


class TooManySocketsError(MillraceError, code="too_many_sockets", retryable=True, http_status=429):
    """Socket beyond the limit of one address."""

    limit = "max_sockets_per_address"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} sockets from your address are open, which is the limit. Use one for many "
            f"generations."
        )


_CODES = {
    "going_away": _SERVICE_RESTART,
    _UNAUTHENTICATED: _POLICY_VIOLATION,
    KEY_REVOKED: _POLICY_VIOLATION,
}


def _drop_stranger(session: SocketSession) -> None:
    if session.caller is None:
        session.note_refusal(Refusal(status=401, code="invalid_api_key", message=""))
        session.drop(_UNAUTHENTICATED)


class _Head(msgspec.Struct, frozen=True):
    """Type and id of a malformed message; other fields are ignored."""

    type: Any = None
    id: Any = None


_HEAD = msgspec.json.Decoder(_Head)


def _head(payload: str | bytes) -> _Head:
    """Read the id that an error is for. Raises InvalidJsonError."""
    try:
        return decode(_HEAD, payload)
    except ParameterError:
        return _Head()
