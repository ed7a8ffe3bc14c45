"""Relay between clients and a server on loopback whose far end can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

_PIECE_BYTES = 64 * 1024


class Relay:
    """Forwards connections to ``port`` for as long as its ``async with`` block lasts. Once it is
    ``silent`` it reads nothing, forwards nothing and closes nothing, as a host whose link is down:
    new connections get no answer, either."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._audible = asyncio.Event()
        self._audible.set()
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._relaying: list[asyncio.Task[None]] = []
        self.num_accepted = 0

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def fall_silent(self) -> None:
        self._audible.clear()

    def speak_again(self) -> None:
        self._audible.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None, "not started"
        self._server.close()
        self._audible.set()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._relaying, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._relaying.append(task)
        self._writers.append(writer)
        await self._audible.wait()
        with contextlib.suppress(OSError):
            to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.append(to_server[1])
            await asyncio.gather(
                self._forward(reader, to_server[1]), self._forward(to_server[0], writer)
            )

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_PIECE_BYTES):
                await self._audible.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()
