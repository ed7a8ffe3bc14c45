"""Server with OpenAI's API and millrace.v1, whose answers and their times a test knows exactly."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

TOKENS_PER_PART = 2
AROUND_TOKENS = 5


class ScriptedServer:
    """Answers each request with ``max_tokens`` tokens, two in each part, a part every ``gap_s``.

    A prompt has a token for each word and five around. While it stalls it answers nothing; with
    ``refuse`` it answers that status. ``bodies`` and ``heads`` are what came.
    """

    def __init__(self, *, gap_s: float = 0.0, refuse: int = 0, has_usage: bool = True) -> None:
        self.gap_s = gap_s
        self.refuse = refuse
        self.has_usage = has_usage
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.url = ""
        self.socket_url = ""
        self._stall_after = 0
        self._stall_s = 0.0
        self._stalled_until_s = 0.0

    def stall(self, after_requests: int, seconds: float) -> None:
        """Answer nothing for ``seconds`` from the request on that comes after so many."""
        self._stall_after, self._stall_s = after_requests, seconds

    async def run(self, ready: threading.Event, stopped: asyncio.Event) -> None:
        http = await asyncio.start_server(self._http, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}"
        protocol = Subprotocol("millrace.v1")
        async with serve(self._socket, "127.0.0.1", 0, subprotocols=[protocol]) as sockets:
            port = next(iter(sockets.sockets)).getsockname()[1]
            self.socket_url = f"http://127.0.0.1:{port}"
            ready.set()
            await stopped.wait()
        http.close()

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.splitlines()
                        if line.startswith("content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                await self._answer(head.split(" ")[1], json.loads(body or b"{}"), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(_whole(200, {"data": [{"id": "scripted"}]}))
            return
        self.bodies.append(body)
        if self.refuse:
            error = {"error": {"code": "too_busy", "message": "later"}}
            writer.write(_whole(self.refuse, error))
            return
        if not body["stream"]:
            writer.write(_whole(200, {"choices": [], "usage": _usage(body)}))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        async for text in self._parts(body["max_tokens"]):
            writer.write(_event({"choices": [{"delta": {"content": text}}]}))
        writer.write(_event({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        if self.has_usage:
            writer.write(_event({"choices": [], "usage": _usage(body)}))
        writer.write(_chunk(b"data: [DONE]\n\n") + _chunk(b""))

    async def _socket(self, connection: ServerConnection) -> None:
        async for message in connection:
            body = json.loads(message)
            self.bodies.append(body)
            name, index = body["id"], 0
            ids = {"id": name, "request_id": "r"}
            await connection.send(json.dumps({"type": "accepted", **ids}))
            async for text in self._parts(body["max_tokens"]):
                num_tokens = len(text.split())
                delta = {"type": "delta", **ids, "index": index, "num_tokens": num_tokens}
                index += num_tokens
                await connection.send(json.dumps(delta | {"text": text}))
            done = {"type": "done", **ids, "finish_reason": "length", "usage": _usage(body)}
            await connection.send(json.dumps(done))

    async def _parts(self, num_tokens: int) -> AsyncIterator[str]:
        if self._stall_s and len(self.bodies) > self._stall_after:
            self._stalled_until_s = time.monotonic() + self._stall_s
            self._stall_s = 0.0
        await asyncio.sleep(max(0.0, self._stalled_until_s - time.monotonic()))
        for first in range(0, num_tokens, TOKENS_PER_PART):
            if first:
                await asyncio.sleep(self.gap_s)
            yield " word" * min(TOKENS_PER_PART, num_tokens - first)


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt") or body["messages"][0]["content"]
    return {
        "prompt_tokens": len(prompt.split()) + AROUND_TOKENS,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def _event(value: dict[str, Any]) -> bytes:
    return _chunk(f"data: {json.dumps(value)}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(status: int, value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def scripted_server(**options: Any) -> Iterator[ScriptedServer]:
    """Run a scripted server in a separate thread until the block ends."""
    server = ScriptedServer(**options)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    def work() -> None:
        loop.run_until_complete(server.run(ready, stopped))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10.0)
