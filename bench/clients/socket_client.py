"""WebSocket client connection for millrace.v1, one generation after the other.

Frames are masked with zeros, which costs no time: masks protect proxies, and a load passes none.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time

from millrace.bench.clients.events import read_message, read_refusal
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.clients.http_client import CONNECTION_LOST, ClientConnection, request_bytes
from millrace.bench.settings import LoadError, ServerTarget
from millrace.schemas.websocket import SUBPROTOCOL

_FIN, _TEXT, _CLOSE, _PING, _PONG = 0x80, 0x1, 0x8, 0x9, 0xA
_MASKED = 0x80


class SocketConnection(ClientConnection):
    """Connection for millrace.v1, open and ``opened`` after the handshake."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = b""
        self._partial: list[bytes] = []
        self._is_greeted = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def greet(self, target: ServerTarget, headers: list[tuple[str, str]]) -> None:
        """Send the handshake."""
        assert self._transport is not None
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        handshake = [
            *headers,
            ("upgrade", "websocket"),
            ("connection", "upgrade"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", key),
            ("sec-websocket-protocol", SUBPROTOCOL),
        ]
        self._transport.write(request_bytes(target, "GET", "/ws", handshake, b""))

    def send(self, request: bytes, exchange: ClientExchange) -> None:
        exchange.status = 101
        super().send(frame(_TEXT, request), exchange)

    # Callbacks of asyncio.

    def connection_lost(self, _exc: Exception | None) -> None:
        self.is_open = False
        if not self.opened.done():
            self.opened.set_exception(LoadError("the server closed the WebSocket's handshake"))
        self._end(CONNECTION_LOST)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._buffer = self._buffer + data if self._buffer else data
        if not self._is_greeted and not self._read_handshake():
            return
        self._read_frames(now_s)

    # Parsing of the answer.

    def _read_handshake(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        words = head.split(b" ", 2)
        if len(words) < 2 or words[1] != b"101":
            refused = ClientExchange(0, 0.0, asyncio.get_running_loop())
            refused.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
            refused.body = self._buffer
            read_refusal(refused)
            self.opened.set_exception(LoadError(f"the WebSocket was refused: {refused.error}"))
            self.close()
            return False
        self._is_greeted = True
        self.is_open = True
        self.opened.set_result(None)
        return True

    def _read_frames(self, now_s: float) -> None:
        buffer, position = self._buffer, 0
        while len(buffer) - position >= 2:
            first, length = buffer[position], buffer[position + 1] & 0x7F
            start = position + 2
            if length >= 126:
                wide = 2 if length == 126 else 8
                if len(buffer) < start + wide:
                    break
                length = int.from_bytes(buffer[start : start + wide], "big")
                start += wide
            if len(buffer) < start + length:
                break
            position = start + length
            self._take(first, buffer[start:position], now_s)
        self._buffer = buffer[position:]

    def _take(self, first: int, payload: bytes, now_s: float) -> None:
        kind = first & 0xF
        if kind == _PING:
            assert self._transport is not None
            self._transport.write(frame(_PONG, payload))
        elif kind == _CLOSE:
            code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
            self._end(f"closed {code}")
            self.close()
        elif kind != _PONG:
            if not first & _FIN or self._partial:
                self._partial.append(payload)
                if not first & _FIN:
                    return
                payload = b"".join(self._partial)
                self._partial.clear()
            exchange = self._exchange
            if exchange is not None and read_message(exchange, payload, now_s):
                self._exchange = None
                exchange.close(now_s)

    def _end(self, code: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(code)
            exchange.close(time.perf_counter())


def frame(kind: int, payload: bytes) -> bytes:
    """Return a client's frame."""
    length = len(payload)
    if length < 126:
        head = bytes([_FIN | kind, _MASKED | length])
    elif length < 1 << 16:
        head = bytes([_FIN | kind, _MASKED | 126]) + length.to_bytes(2, "big")
    else:
        head = bytes([_FIN | kind, _MASKED | 127]) + length.to_bytes(8, "big")
    return head + bytes(4) + payload
