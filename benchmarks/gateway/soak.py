"""Ten minutes of clients that connect, disconnect and stall at random, to find leaks.

    python -m benchmarks.gateway --only soak [--minutes 10] [--clients 500] [--json FILE]

Half of the clients use HTTP, half WebSocket. Each acts at random, then connects again: it reads an
answer to its end, leaves in the middle, stops reading for a while, sends nothing, cancels, or
breaks off a request. Once a second the gateway's resident memory and open files are read from
outside. The warm-up is a fifth of the time. Growth is the mean of the last tenth over the mean of
the first tenth after the warm-up. When all clients are gone, the gateway's gauges (``/metrics``)
and open files must return to their values before the first client.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import NamedTuple, cast

import msgspec
import uvloop

from benchmarks.support.command import PartResult
from benchmarks.support.gateway_process import (
    HANDSHAKE,
    TEXT_FRAME,
    GatewayProcess,
    running_gateway,
    socket_request,
    sse_request,
)
from benchmarks.support.processes import SPAWN, spawned
from benchmarks.support.simulated_worker import simulated_worker
from millrace.bench.clients.socket_client import frame
from millrace.bench.load import allow_many_files
from millrace.runtime.addresses import open_directly

# A small window, so that a stall reaches the gateway instead of the kernel's buffers.
_RECEIVE_BUFFER_BYTES = 4_096
_MAX_TOKENS = (5, 150)
_MAX_LEAVE_S = 4.0
_MAX_STALL_S = 6.0
_MAX_IDLE_S = 5.0
_MAX_PAUSE_S = 1.0
_ANSWER_S = 60.0
_READ_BYTES = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Way(NamedTuple):
    """Protocol of clients.

    An answer ends with ``last``, which comes after ``before``. ``own`` has actions of this protocol
    only, with weights.
    """

    name: str
    request: Callable[..., bytes]
    last: bytes
    before: bytes
    own: str
    weight: int


_HTTP = _Way("http", sse_request, b"0\r\n\r\n", b"[DONE]", "break off", 1)
_SOCKET = _Way("websocket", socket_request, b'"type":"done"', b"", "cancel", 3)


class SoakClients:
    """``num_clients`` clients that run until ``end_s`` (monotonic); ``counts`` their actions."""

    def __init__(self, port: int, num_clients: int, end_s: float, seed: int) -> None:
        self._port = port
        self._num_clients = num_clients
        self._end_s = end_s
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._num_clients)))

    async def _client(self, number: int) -> None:
        """Run a client; odd numbers use WebSocket."""
        source = random.Random(self._random.randrange(1 << 60))
        way = _SOCKET if number % 2 else _HTTP
        await asyncio.sleep(source.uniform(0, _MAX_PAUSE_S))
        while time.monotonic() < self._end_s:
            streams = await self._connect()
            try:
                await self._converse(way, streams, source)
            except (ConnectionError, asyncio.IncompleteReadError):
                # The gateway closes a connection that stalls too long, as it should.
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

    async def _converse(self, way: _Way, streams: Streams, source: random.Random) -> None:
        """Send a few requests, one after another, until one ends the connection."""
        if way is _SOCKET:
            streams[1].write(HANDSHAKE)
            async with asyncio.timeout(_ANSWER_S):
                await streams[0].readuntil(b"\r\n\r\n")
        for _ in range(source.randint(1, 4)):
            names = ("read", "leave", "stall", "idle", way.own)
            name = source.choices(names, weights=(4, 3, 2, 1, way.weight))[0]
            await _behave(name, way, streams, source)
            self.counts[f"{way.name} {name}"] += 1
            if name not in {"read", "cancel"}:
                return


async def _behave(name: str, way: _Way, streams: Streams, source: random.Random) -> None:
    reader, writer = streams
    request = way.request(max_tokens=source.randint(*_MAX_TOKENS))
    if name == "idle":
        await asyncio.sleep(source.uniform(0, _MAX_IDLE_S))
        return
    if name == "break off":
        writer.write(request[: source.randrange(1, len(request))])
        await asyncio.sleep(source.uniform(0, 1))
        return
    writer.write(request)
    match name:
        case "read":
            await _read_until(reader, way.last, way.before)
        case "leave":
            for other in "bc"[: source.randint(0, 2) if way is _SOCKET else 0]:
                writer.write(socket_request(other, max_tokens=source.randint(*_MAX_TOKENS)))
            await _read_for(reader, source.uniform(0, _MAX_LEAVE_S))
        case "stall":
            if way.last not in await _read_for(reader, source.uniform(0, 1)):
                await _stall(writer, source)
                await _read_until(reader, way.last, b"")
        case "cancel":
            if way.last not in await _read_for(reader, source.uniform(0, 2)):
                cancel = json.dumps({"type": "cancel", "id": "a"}).encode()
                writer.write(frame(TEXT_FRAME, cancel))
                await _read_until(reader, way.last, b"")


def run_soak_clients(
    port: int, num_clients: int, seconds: float, seed: int, counts: Queue[dict[str, int]]
) -> None:
    """Run the clients' process, which ends when all clients have ended."""
    allow_many_files()

    async def run() -> None:
        clients = SoakClients(port, num_clients, time.monotonic() + seconds, seed)
        await clients.run()
        counts.put(dict(clients.counts))

    uvloop.run(run())


async def _read_until(reader: asyncio.StreamReader, last: bytes, before: bytes) -> None:
    """Read up to ``last``, which comes after ``before``.

    Raises TimeoutError, or ConnectionError if the gateway closes earlier.
    """
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
    """Read for ``seconds``, or until the gateway closes."""
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


_TOKENS_PER_S = 20.0
_SAMPLE_S = 1.0
_SHOW_S = 30.0
_WARM_UP_SHARE = 0.2
_MAX_GROWTH = 0.05
# Answers of clients that left are kept for a while, so that they can resume.
_SETTLE_S = 90.0
_LAST_ANSWERS_S = 120.0
# Tolerance for files of the connections to NATS and Redis.
_SPARE_FILES = 4
_GAUGE = re.compile(
    r"^(millrace_(?:open|kept|running)_\w+|millrace_tasks) ([0-9.e+]+)$", re.MULTILINE
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """State of the gateway at one time."""

    at_s: float
    rss_bytes: int
    num_files: int
    open_streams: int


class SoakFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a soak run.

    ``growth`` is the memory's after the warm-up. ``left`` has the gauges, and the files, that did
    not return to their earlier values, with the excess. ``did`` counts the clients' actions.
    """

    minutes: float
    num_clients: int
    rss_warm_bytes: float
    rss_end_bytes: float
    growth: float
    left: dict[str, float]
    did: dict[str, int]
    settled_s: float
    samples: tuple[Sample, ...]

    @property
    def problems(self) -> list[str]:
        """List the violations of the goals."""
        said = [f"{name}: {over:g} more than before" for name, over in self.left.items()]
        if self.growth > _MAX_GROWTH:
            said.append(f"memory grew by {self.growth:.1%}")
        if unanswered := self.did.get("unanswered"):
            said.append(f"{unanswered} requests had no answer")
        return said


def _soak(minutes: float, num_clients: int, seed: int) -> SoakFigures:
    with (
        running_gateway() as gateway,
        simulated_worker(gateway.nats_url, _TOKENS_PER_S),
    ):
        time.sleep(_SAMPLE_S)
        before = _state(gateway)
        counts: Queue[dict[str, int]] = SPAWN.Queue()
        with spawned(
            run_soak_clients, gateway.port, num_clients, minutes * 60, seed, counts
        ) as clients:
            samples = _watch(gateway, clients, minutes * 60)
            did = counts.get(timeout=_LAST_ANSWERS_S)
        left, settled_s = _settle(gateway, before)
    warm_up_s = minutes * 60 * _WARM_UP_SHARE
    tenth_s = minutes * 6
    warm = _mean_rss(samples, warm_up_s, warm_up_s + tenth_s)
    end = _mean_rss(samples, minutes * 60 - tenth_s, minutes * 60)
    return SoakFigures(
        minutes=minutes,
        num_clients=num_clients,
        rss_warm_bytes=warm,
        rss_end_bytes=end,
        growth=end / warm - 1,
        left=left,
        did=did,
        settled_s=settled_s,
        samples=tuple(samples),
    )


def _watch(gateway: GatewayProcess, clients: BaseProcess, seconds: float) -> list[Sample]:
    """Sample once a second. Raises RuntimeError if the clients have ended early."""
    samples: list[Sample] = []
    start_s = time.monotonic()
    shown_s = 0.0
    while (at_s := time.monotonic() - start_s) < seconds:
        if not clients.is_alive() and at_s < seconds - _SAMPLE_S:
            raise RuntimeError("the clients' process has ended; its error is above")
        sample = Sample(
            at_s=at_s,
            rss_bytes=gateway.usage.rss_bytes(),
            num_files=gateway.usage.num_files(),
            open_streams=int(gateway.health()["open_streams"]),
        )
        samples.append(sample)
        if at_s >= shown_s:
            shown_s += _SHOW_S
            print(
                f"{at_s:6.0f} s   {sample.rss_bytes / 1e6:7.1f} MB   {sample.num_files:5} files   "
                f"{sample.open_streams:5} open streams",
                flush=True,
            )
        time.sleep(max(0.0, _SAMPLE_S - (time.monotonic() - start_s - at_s)))
    return samples


def _state(gateway: GatewayProcess) -> dict[str, float]:
    """Return the gauges of open resources, and the number of files."""
    with open_directly(f"{gateway.url}/metrics", timeout_s=10.0) as answer:
        text = answer.read().decode()
    gauges = {name: float(value) for name, value in _GAUGE.findall(text)}
    return {**gauges, "open files": gateway.usage.num_files()}


def _settle(gateway: GatewayProcess, before: dict[str, float]) -> tuple[dict[str, float], float]:
    """Wait until values stop falling; return the excess over ``before`` and the seconds waited."""
    start_s = time.monotonic()
    while True:
        left = {
            name: value - before.get(name, 0.0)
            for name, value in _state(gateway).items()
            if value - before.get(name, 0.0) > (_SPARE_FILES if name == "open files" else 0)
        }
        waited_s = time.monotonic() - start_s
        if not left or waited_s > _SETTLE_S:
            return left, waited_s
        time.sleep(_SAMPLE_S)


def _mean_rss(samples: Sequence[Sample], from_s: float, to_s: float) -> float:
    return statistics.fmean(s.rss_bytes for s in samples if from_s <= s.at_s <= to_s)


def run(minutes: float = 10.0, clients: int = 500, seed: int = 0) -> PartResult:
    """Soak the gateway; the goal is that nothing leaks."""
    if minutes < 0.5:
        sys.exit("--minutes must be at least 0.5")
    figures = _soak(minutes, clients, seed)
    for name, count in sorted(figures.did.items()):
        print(f"{name:<20}{count:>9,}")
    print(
        f"memory {figures.rss_warm_bytes / 1e6:.1f} MB after the warm-up, "
        f"{figures.rss_end_bytes / 1e6:.1f} MB at the end: {figures.growth:+.1%} "
        f"(goal: at most {_MAX_GROWTH:.0%})"
    )
    print(f"all resources were released {figures.settled_s:.0f} s after the last client")
    for problem in figures.problems:
        print(f"PROBLEM: {problem}")
    return PartResult(figures, not figures.problems)
