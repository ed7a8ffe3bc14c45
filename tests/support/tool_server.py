"""HTTP server with scripted answers, which records its requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

Headers = dict[str, str]


class Seen(NamedTuple):
    """A request; the names of its headers are lower case."""

    method: str
    target: str
    headers: Headers
    body: bytes


Write = Callable[[bytes], Awaitable[None]]
Answer = Callable[[Seen, Write], Awaitable[None]]


def reply(body: bytes | str, status: int = 200, **headers: str) -> Answer:
    """Answer at once; ``content_type`` becomes ``content-type``."""
    data = body.encode() if isinstance(body, str) else body
    fields = {"content_length": str(len(data))} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())

    async def answer(_seen: Seen, write: Write) -> None:
        await write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + data)

    return answer


class ToolServer:
    """Serves ``answers`` by path, from 127.0.0.1."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.seen: list[Seen] = []
        self.num_connections = 0
        self.port = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        # A client that leaves in the middle is what some tests are about.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                seen = await _read_request(reader)
                self.seen.append(seen)
                path = seen.target.partition("?")[0]
                await self.answers.get(path, reply("nothing here", 404))(seen, write)
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers: Headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)


@asynccontextmanager
async def tool_server() -> AsyncIterator[ToolServer]:
    """Serve on a free port until the block ends."""
    server = ToolServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
