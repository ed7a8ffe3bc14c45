"""Clients of ``soak`` that behave badly at random: leave, stall, fall silent, cancel, break off."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.queues import Queue
from typing import cast

import uvloop

from benchmarks.support.gateway_clients import HANDSHAKE, TEXT_FRAME, socket_request, sse_request
from millrace.bench.clients.socket_client import frame
from millrace.bench.files import allow_many_files

# A small window has a stall reach the gateway, instead of staying in the kernel's buffers.
_RECEIVE_BUFFER_BYTES = 4_096
_MAX_TOKENS = (5, 150)
_MAX_LEAVE_S = 4.0
_MAX_STALL_S = 6.0
_MAX_IDLE_S = 5.0
_MAX_PAUSE_S = 1.0
_ANSWER_S = 60.0
_READ_BYTES = 1 << 16
_CHUNKED_END = b"0\r\n\r\n"
_DONE = b'"type":"done"'

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SoakClients:
    """``num_clients`` of them until ``end_s`` (monotonic); ``counts`` says what they did."""

    def __init__(self, port: int, num_clients: int, end_s: float, seed: int) -> None:
        self._port = port
        self._num_clients = num_clients
        self._end_s = end_s
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._num_clients)))

    async def _client(self, number: int) -> None:
        """Every other client comes by WebSocket."""
        source = random.Random(self._random.randrange(1 << 60))
        conversation = self._socket if number % 2 else self._http
        await asyncio.sleep(source.uniform(0, _MAX_PAUSE_S))
        while time.monotonic() < self._end_s:
            streams = await self._connect()
            try:
                await conversation(streams, source)
            except (ConnectionError, asyncio.IncompleteReadError):
                # A client that stalls too long is cut off: that is what a gateway does.
                self.counts["cut off"] += 1
            except TimeoutError:
                self.counts["unanswered"] += 1
            finally:
                streams[1].transport.abort()
            await asyncio.sleep(source.uniform(0, _MAX_PAUSE_S))

    async def _connect(self) -> Streams:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        except BaseException:
            connection.close()
            raise
        return await asyncio.open_connection(sock=connection, limit=_READ_BYTES)

    # One connection by HTTP: a few requests, one after the other, until one ends it.

    async def _http(self, streams: Streams, source: random.Random) -> None:
        behaviours: dict[str, Callable[[Streams, random.Random], Awaitable[None]]] = {
            "read": self._http_read,
            "leave": self._http_leave,
            "stall": self._http_stall,
            "idle": self._idle,
            "break off": self._http_break_off,
        }
        for _ in range(source.randint(1, 4)):
            name = source.choices(list(behaviours), weights=(4, 3, 2, 1, 1))[0]
            await behaviours[name](streams, source)
            self.counts[f"http {name}"] += 1
            if name != "read":
                return

    async def _http_read(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_http_request(source))
        await _read_until(streams[0], _CHUNKED_END, b"[DONE]")

    async def _http_leave(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_http_request(source))
        await _read_for(streams[0], source.uniform(0, _MAX_LEAVE_S))

    async def _http_stall(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_http_request(source))
        if _CHUNKED_END not in await _read_for(streams[0], source.uniform(0, 1)):
            await _stall(streams[1], source)
            await _read_until(streams[0], _CHUNKED_END, b"")

    async def _http_break_off(self, streams: Streams, source: random.Random) -> None:
        request = _http_request(source)
        streams[1].write(request[: source.randrange(1, len(request))])
        await asyncio.sleep(source.uniform(0, 1))

    # One connection by WebSocket: a few generations, some at the same time.

    async def _socket(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(HANDSHAKE)
        async with asyncio.timeout(_ANSWER_S):
            await streams[0].readuntil(b"\r\n\r\n")
        behaviours: dict[str, Callable[[Streams, random.Random], Awaitable[None]]] = {
            "read": self._socket_read,
            "leave": self._socket_leave,
            "stall": self._socket_stall,
            "idle": self._idle,
            "cancel": self._socket_cancel,
        }
        for _ in range(source.randint(1, 4)):
            name = source.choices(list(behaviours), weights=(4, 3, 2, 1, 3))[0]
            await behaviours[name](streams, source)
            self.counts[f"websocket {name}"] += 1
            if name not in {"read", "cancel"}:
                return

    async def _socket_read(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_socket_request("a", source))
        await _read_until(streams[0], _DONE, b"")

    async def _socket_leave(self, streams: Streams, source: random.Random) -> None:
        for name in "abc"[: source.randint(1, 3)]:
            streams[1].write(_socket_request(name, source))
        await _read_for(streams[0], source.uniform(0, _MAX_LEAVE_S))

    async def _socket_stall(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_socket_request("a", source))
        if _DONE not in await _read_for(streams[0], source.uniform(0, 1)):
            await _stall(streams[1], source)
            await _read_until(streams[0], _DONE, b"")

    async def _socket_cancel(self, streams: Streams, source: random.Random) -> None:
        streams[1].write(_socket_request("a", source))
        if _DONE in await _read_for(streams[0], source.uniform(0, 2)):
            return
        streams[1].write(frame(TEXT_FRAME, json.dumps({"type": "cancel", "id": "a"}).encode()))
        await _read_until(streams[0], _DONE, b"")

    async def _idle(self, _streams: Streams, source: random.Random) -> None:
        await asyncio.sleep(source.uniform(0, _MAX_IDLE_S))


def run_soak_clients(
    port: int, num_clients: int, seconds: float, seed: int, counts: Queue[dict[str, int]]
) -> None:
    """The process of the clients; it ends when all of them have."""
    allow_many_files()

    async def run() -> None:
        clients = SoakClients(port, num_clients, time.monotonic() + seconds, seed)
        await clients.run()
        counts.put(dict(clients.counts))

    uvloop.run(run())


def _http_request(source: random.Random) -> bytes:
    return sse_request(max_tokens=source.randint(*_MAX_TOKENS))


def _socket_request(name: str, source: random.Random) -> bytes:
    return socket_request(name, max_tokens=source.randint(*_MAX_TOKENS))


async def _read_until(reader: asyncio.StreamReader, last: bytes, before: bytes) -> None:
    """Read up to ``last``, which comes after ``before``. Raises TimeoutError, or ConnectionError
    if the gateway closes earlier."""
    tail = b""
    seen = not before
    async with asyncio.timeout(_ANSWER_S):
        while not (seen and last in tail):
            data = await reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("closed before its end")
            tail = tail[-64:] + data
            seen = seen or before in tail


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """What comes in that time, or until the gateway closes."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            while data := await reader.read(_READ_BYTES):
                parts.append(data)
    except TimeoutError:
        return b"".join(parts)
    return b"".join(parts)


async def _stall(writer: asyncio.StreamWriter, source: random.Random) -> None:
    """Read nothing for a while."""
    transport = cast("asyncio.ReadTransport", writer.transport)
    transport.pause_reading()
    await asyncio.sleep(source.uniform(1, _MAX_STALL_S))
    transport.resume_reading()
