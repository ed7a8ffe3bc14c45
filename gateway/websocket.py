"""``/v1/ws``: many generations on one socket, on bare ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from gateway.core import Gateway
from gateway.errors import InvalidJsonError, refusal_of
from gateway.http import JSON, Receive, Scope, Send
from gateway.parsing import decode
from gateway.socket_session import SocketSession
from schemas.errors import MillraceError, ParameterError
from schemas.websocket import (
    SUBPROTOCOL,
    CancelGeneration,
    ClientMessage,
    Error,
    Generate,
    Pong,
)

ROUTE = "/v1/ws"
_LOOSE = msgspec.json.Decoder()
_PONG = msgspec.json.encode(Pong()).decode()
_MESSAGE_TYPES = ("generate", "cancel", "ping")


class WebSocketHandler:
    """Serves one socket for each call: reads its messages, answers each, until it closes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder: msgspec.json.Decoder[ClientMessage] = msgspec.json.Decoder(ClientMessage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        offered = scope["subprotocols"]
        if offered and SUBPROTOCOL not in offered:
            await _reject(send, f"This socket speaks the subprotocol {SUBPROTOCOL}; offer that.")
            self._gateway.metrics.requests.labels(ROUTE, "400").inc()
            return
        subprotocol = SUBPROTOCOL if offered else None
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        self._gateway.metrics.requests.labels(ROUTE, "101").inc()
        session = SocketSession(self._gateway, send)
        sender = asyncio.create_task(session.send_all())
        try:
            await self._read(receive, session, sender)
        finally:
            session.close()
            sender.cancel()
            # OSError: the client went away under a write.
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sender
        if session.dropped:
            # 1013: try again later; what it has missed can be asked for again.
            await send({"type": "websocket.close", "code": 1013, "reason": session.dropped})

    async def _read(
        self, receive: Receive, session: SocketSession, sender: asyncio.Task[None]
    ) -> None:
        """Handle messages until the client leaves, is dropped or cannot be written to."""
        dropped = asyncio.create_task(session.wait_dropped())
        try:
            while True:
                reading = asyncio.ensure_future(receive())
                await asyncio.wait((reading, dropped, sender), return_when=asyncio.FIRST_COMPLETED)
                if dropped.done() or sender.done():
                    reading.cancel()
                    return
                event = reading.result()
                if event["type"] == "websocket.disconnect":
                    return
                text = event.get("text")
                self._handle(text if text is not None else event["bytes"], session)
        finally:
            dropped.cancel()

    def _handle(self, payload: str | bytes, session: SocketSession) -> None:
        try:
            message = decode(self._decoder, payload)
        except MillraceError as error:
            session.say(self._malformed(payload, error, session))
            return
        if isinstance(message, Generate):
            refused = session.generate(message)
            if refused is not None:
                session.say(refused)
        elif isinstance(message, CancelGeneration):
            session.cancel(message.id)
        else:
            session.say_text(_PONG)

    def _malformed(
        self, payload: str | bytes, error: MillraceError, session: SocketSession
    ) -> Error:
        """The error for a message that is not one, to the id that it names if it can be read; not
        to that of a generation that runs, which would end with it."""
        try:
            fields = _loose(payload)
        except InvalidJsonError as not_json:
            return Error(code=not_json.code, message=not_json.message)
        named = fields.get("id")
        known_id = named if isinstance(named, str) and not session.runs(named) else None
        if fields.get("type") not in _MESSAGE_TYPES:
            text = f"type must be one of {', '.join(_MESSAGE_TYPES)}."
            return Error(code="unknown_message_type", message=text, param="type", id=known_id)
        refusal = refusal_of(error)
        return Error(code=refusal.code, message=refusal.message, param=refusal.param, id=known_id)


def _loose(payload: str | bytes) -> dict[str, Any]:
    """The message as plain JSON, to find out whom its error is for."""
    value = decode(_LOOSE, payload)
    return value if isinstance(value, dict) else {}


async def _reject(send: Send, message: str) -> None:
    refusal = refusal_of(ParameterError("sec-websocket-protocol", message))
    start = {"type": "websocket.http.response.start", "status": refusal.status, "headers": [JSON]}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": refusal.body})
