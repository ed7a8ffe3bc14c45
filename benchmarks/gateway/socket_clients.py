"""The clients of ``sockets``: thousands of WebSockets in a few processes."""

from __future__ import annotations

import asyncio
import os
import re
import time
from array import array
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

import uvloop

from benchmarks.support.gateway_clients import HANDSHAKE, socket_request
from benchmarks.support.processes import SPAWN
from millrace.bench.clients.socket_client import frame
from millrace.bench.files import allow_many_files
from millrace.bench.health import HealthProbe
from tests.support.waiting import eventually

MAX_TOKENS = 2_000
_CONNECTS_AT_ONCE = 64
_ASKS_PER_S = 1_000.0
_TIMEOUT_S = 90.0
_FIRST_TOKENS_S = 60.0
_PING, _PONG = 0x89, 0xA
_STAMP = re.compile(rb" (\d{19})")


class _Socket(asyncio.Protocol):
    """Reads stamps out of whatever comes, and answers pings."""

    def __init__(self, clients: _Clients) -> None:
        self._clients = clients
        self._rest = b""
        self._has_token = False
        self.transport: asyncio.Transport | None = None
        self.opened = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(HANDSHAKE)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._clients.num_lost += 1

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if not self.opened.done():
            if b" 101 " in data:
                self.opened.set_result(None)
            else:
                self.opened.set_exception(ConnectionError(f"refused: {data[:200]!r}"))
            return
        data = self._whole_frames(self._rest + data)
        stamps = _STAMP.findall(data)
        if stamps:
            self._clients.take(now_ns, stamps, is_first=not self._has_token)
            self._has_token = True
        elif b'"type":"error"' in data:
            self._clients.errors.append(data)

    def _whole_frames(self, data: bytes) -> bytes:
        """As much of it as is whole frames; pings among them are answered."""
        position, size = 0, len(data)
        while size - position >= 2:
            length, start = data[position + 1], position + 2
            if length >= 126:
                wide = 2 if length == 126 else 8
                length = int.from_bytes(data[start : start + wide], "big")
                start += wide
            if start + length > size:
                break
            if data[position] == _PING and self.transport is not None:
                self.transport.write(frame(_PONG, data[start : start + length]))
            position = start + length
        self._rest = data[position:]
        return data[:position]


class _Clients:
    def __init__(self, port: int, num_sockets: int, pipe: Connection) -> None:
        self._port = port
        self._num_sockets = num_sockets
        self._pipe = pipe
        self._sockets: list[_Socket] = []
        self._latencies_ms = array("f")
        self._measures = False
        self.errors: list[bytes] = []
        self.num_started = 0
        self.num_lost = 0

    def take(self, now_ns: int, stamps: list[bytes], *, is_first: bool) -> None:
        self.num_started += is_first
        if self._measures:
            self._latencies_ms.extend((now_ns - int(stamp)) / 1e6 for stamp in stamps)

    async def run(self) -> None:
        """Each step is begun by a message of the parent and ends with one to it."""
        places = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        await self._told()
        await asyncio.gather(*(self._connect(places) for _ in range(self._num_sockets)))
        self._pipe.send(len(self._sockets))
        await self._told()
        await self._ask_all()
        self._pipe.send(self.num_started)
        seconds = await self._told()
        probe = HealthProbe()
        probe.start()
        self._measures = True
        await asyncio.sleep(seconds)
        self._measures = False
        self._pipe.send((self._latencies_ms.tobytes(), probe.stop(), self.num_lost))
        await self._told()

    async def _connect(self, places: asyncio.Semaphore) -> None:
        async with places:
            made = await asyncio.get_running_loop().create_connection(
                lambda: _Socket(self), "127.0.0.1", self._port
            )
            await made[1].opened
            self._sockets.append(made[1])

    async def _ask_all(self) -> None:
        """At a steady pace; return when each has its first token."""
        request = socket_request(max_tokens=MAX_TOKENS)
        start_s = time.perf_counter()
        for number, one in enumerate(self._sockets):
            late_s = time.perf_counter() - start_s - number / _ASKS_PER_S
            if late_s < 0:
                await asyncio.sleep(-late_s)
            assert one.transport is not None
            one.transport.write(request)
        await eventually(
            lambda: self.num_started == self._num_sockets or bool(self.errors),
            _FIRST_TOKENS_S,
            f"a first token on each of {self._num_sockets} sockets",
        )
        if self.errors:
            raise ConnectionError(f"{len(self.errors)} errors, the first: {self.errors[0]!r}")

    async def _told(self) -> float:
        """The parent's next message."""
        told: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), lambda: told.set_result(self._pipe.recv()))
        try:
            return await told
        finally:
            loop.remove_reader(self._pipe.fileno())
            # The event loop made it non-blocking; what is sent is more than a pipe takes at once.
            os.set_blocking(self._pipe.fileno(), True)


def _run_clients(port: int, num_sockets: int, pipe: Connection) -> None:
    allow_many_files()
    uvloop.run(_Clients(port, num_sockets, pipe).run())


class ClientProcesses:
    """Owns them; ``stop`` ends them."""

    def __init__(self, port: int, num_sockets: int, num_processes: int) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(num_processes):
            ours, theirs = SPAWN.Pipe()
            share = num_sockets // num_processes + (rank < num_sockets % num_processes)
            process = SPAWN.Process(target=_run_clients, args=(port, share, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    async def step(self, told: float) -> list[object]:
        """Tell all of them, and return what each answers. Raises EOFError if one has died."""
        for pipe in self._pipes:
            pipe.send(told)
        return [await asyncio.to_thread(self._answer, pipe) for pipe in self._pipes]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, pipe: Connection) -> object:
        if not pipe.poll(_TIMEOUT_S):
            raise TimeoutError("a client process does not answer")
        return pipe.recv()
