"""Libraries of the gateway without the gateway: the ceiling of any relay built on them.

A process receives the same envelopes with nats-py, decodes them with msgspec, and writes the text
of each stream to its client through uvicorn, by a bare ASGI handler that joins waiting texts and
sends them. There is no parsing of requests, no queue, and no state of a stream except its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import msgspec
import nats
import uvicorn
import uvloop
from nats.aio.msg import Msg
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from benchmarks.support.processes import SPAWN, ProcessUsage, spawned
from millrace.bench.load import allow_many_files
from millrace.bus import subjects
from millrace.gateway.server import tune_gc
from millrace.schemas.frames import Delta, Done, FrameBatch
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.waiting import eventually

REPLY = "raw"
_BACKLOG = 4_096
_START_TIMEOUT_S = 30.0
_SSE_HEAD = (
    b'data: {"id":"chatcmpl-000000000000000000000000","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"demo","choices":[{"index":0,"delta":{"content":'
)
_SSE_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_SOCKET_HEAD = (
    b'{"type":"delta","id":"a","request_id":"ws-000000000000000000000000","index":100,'
    b'"num_tokens":1,"text":'
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(FrameBatch).decode


def request_id(number: int) -> str:
    """Return the id of the ``number``-th opened stream."""
    return f"raw-{number:024x}"


class RawStack:
    """Process that serves every request with the stream ``request_id(n)``, where n counts them."""

    def __init__(self, pid: int | None, port: int, num_streams: Synchronized[int]) -> None:
        self.port = port
        self.usage = ProcessUsage(pid)
        self._num_streams = num_streams

    async def wait_streams(self, count: int) -> None:
        """Wait until ``count`` streams are open. Raises AssertionError on a timeout."""
        await eventually(
            lambda: self._num_streams.value >= count, _START_TIMEOUT_S, "the opening of streams"
        )


@contextlib.contextmanager
def raw_stack(nats_url: str) -> Iterator[RawStack]:
    """Run a raw stack during the block."""
    ports: Queue[int] = SPAWN.Queue()
    num_streams = SPAWN.Value("i", 0)
    with spawned(_serve, nats_url, ports, num_streams) as process:
        yield RawStack(process.pid, ports.get(timeout=_START_TIMEOUT_S), num_streams)


class _Stream:
    __slots__ = ("ended", "texts", "wakeup")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.wakeup = asyncio.Event()
        self.ended = False

    async def take(self) -> bytes:
        """Wait for new text and return it as JSON; empty at the end."""
        while not self.texts and not self.ended:
            self.wakeup.clear()
            await self.wakeup.wait()
        if not self.texts:
            return b""
        text = _encode("".join(self.texts))
        self.texts.clear()
        return text


class _Relay:
    def __init__(self, num_streams: Synchronized[int]) -> None:
        self._streams: dict[str, _Stream] = {}
        self._num_streams = num_streams

    async def on_message(self, message: Msg) -> None:
        for addressed in _decode(message.data).frames:
            stream = self._streams[addressed.request_id]
            if type(addressed.frame) is Delta:
                stream.texts.append(addressed.frame.text)
            elif type(addressed.frame) is Done:
                stream.ended = True
            stream.wakeup.set()

    def _open(self) -> _Stream:
        stream = _Stream()
        self._streams[request_id(len(self._streams))] = stream
        self._num_streams.value = len(self._streams)
        return stream

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["type"] == "http":
            await self._events(send)
        else:
            await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL})
            await receive()
            await self._messages(send)

    async def _events(self, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        stream = self._open()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while text := await stream.take():
            body = _SSE_HEAD + text + _SSE_TAIL
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _messages(self, send: Any) -> None:
        stream = self._open()
        while text := await stream.take():
            message = (_SOCKET_HEAD + text + b"}").decode()
            await send({"type": "websocket.send", "text": message})
        await send({"type": "websocket.send", "text": '{"type":"done","finish_reason":"length"}'})


def _serve(nats_url: str, ports: Queue[int], num_streams: Synchronized[int]) -> None:
    allow_many_files()

    async def serve() -> None:
        relay = _Relay(num_streams)
        connection = await nats.connect(nats_url)
        await connection.subscribe(subjects.envelope(REPLY), cb=relay.on_message)
        await connection.flush()
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        config = uvicorn.Config(
            relay.app,
            http=HttpToolsProtocol,
            ws=WebSocketsSansIOProtocol,
            ws_per_message_deflate=False,
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            access_log=False,
            log_config=None,
            backlog=_BACKLOG,
        )
        ports.put(listener.getsockname()[1])
        tune_gc()
        await uvicorn.Server(config).serve(sockets=[listener])

    uvloop.run(serve())
