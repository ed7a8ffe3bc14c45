"""Load process: sends its share of the requests and records the answers."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import uvloop

from millrace.bench.arrivals import arrival_times
from millrace.bench.clients.client import LoadClient
from millrace.bench.clients.exchange import UNFINISHED, ClientExchange, ClientSample
from millrace.bench.health import HealthProbe, ProcessHealth
from millrace.bench.prompts import PromptSource, prompts_of
from millrace.bench.settings import LoadSettings

_PROGRESS_S = 0.5
_REFUSED_PAUSE_S = 0.1


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of a process: requests since the start, and parts of the ended answers."""

    num_sent: int
    num_ended: int
    num_failed: int
    num_parts: int


class LoadOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """Result of a process. ``stopped_s`` is the end of its load, before the wait for answers, in
    seconds from the start."""

    samples: list[ClientSample]
    health: ProcessHealth
    stopped_s: float


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a process: its rank among ``settings.num_processes``."""

    settings: LoadSettings
    rank: int

    @property
    def concurrency(self) -> int:
        """Slots of the closed loop in this process."""
        assert self.settings.concurrency is not None
        whole, rest = divmod(self.settings.concurrency, self.settings.num_processes)
        return whole + (self.rank < rest)


def load_process(share: Share, pipe: Connection) -> None:
    """Run a load process.

    It sends ``ready`` and receives the start's time; any later message stops it early. It sends
    LoadProgress regularly and a LoadOutcome at its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_files()
    prompts = prompts_of(share.settings)
    pipe.send_bytes(b"ready")
    start_s = float(pipe.recv_bytes())
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    outcome = uvloop.run(_Load(share, prompts, start_s, pipe).run())
    # The event loop made the pipe non-blocking; an outcome is larger than a pipe takes at once.
    os.set_blocking(pipe.fileno(), True)
    pipe.send_bytes(msgspec.msgpack.encode(outcome))


class _Load:
    def __init__(
        self, share: Share, prompts: PromptSource, start_s: float, pipe: Connection
    ) -> None:
        self._share = share
        self._settings = share.settings
        self._prompts = prompts
        self._start_s = start_s
        self._pipe = pipe
        self._client = LoadClient(share.settings)
        self._exchanges: list[ClientExchange] = []
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._num_ended = self._num_failed = self._num_parts = 0

    async def run(self) -> LoadOutcome:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._on_message)
        report = asyncio.create_task(self._report())
        probe = HealthProbe()
        await asyncio.sleep(max(0.0, self._start_s - time.perf_counter()))
        probe.start()
        sending = asyncio.create_task(
            self._open_loop() if self._settings.rate_per_s is not None else self._closed_loop()
        )
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopped_s = time.perf_counter() - self._start_s
        if not self._stopped.is_set():
            await self._drain(stopping)
        health = probe.stop()
        for task in (sending, stopping, report, *self._running):
            task.cancel()
        results = await asyncio.gather(
            sending, stopping, report, *self._running, return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                raise result
        loop.remove_reader(self._pipe.fileno())
        self._client.close()
        return LoadOutcome(
            [self._sample(exchange) for exchange in self._exchanges], health, stopped_s
        )

    def _sample(self, exchange: ClientExchange) -> ClientSample:
        if not exchange.done.done() or exchange.done.cancelled():
            exchange.error = UNFINISHED
            exchange.end_s = time.perf_counter()
        return exchange.sample(self._start_s)

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        """Wait for outstanding answers, with a timeout."""
        if not self._running:
            return
        everything = asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.wait(
            (everything, stopping),
            timeout=self._settings.drain_s,
            return_when=asyncio.FIRST_COMPLETED,
        )

    # Open loop: each request is sent at its due time, independent of the others.

    async def _open_loop(self) -> None:
        settings = self._settings
        assert settings.rate_per_s is not None
        due = arrival_times(
            settings.rate_per_s,
            settings.burstiness,
            None if settings.duration_s is None else settings.warm_up_s + settings.duration_s,
            settings.num_requests,
            settings.seed,
        )
        for index in range(self._share.rank, len(due), settings.num_processes):
            due_s = self._start_s + float(due[index])
            request = self._client.encode(index, self._prompts.prompt(index))
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self._spawn(index, due_s, request)

    def _spawn(self, index: int, due_s: float, request: bytes) -> None:
        exchange = self._exchange(index, due_s)
        task = asyncio.create_task(self._one(request, exchange))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # Closed loop: each slot sends its next request when its previous one has ended.

    async def _closed_loop(self) -> None:
        indices = iter(self._indices())
        slots = [asyncio.create_task(self._slot(indices)) for _ in range(self._share.concurrency)]
        self._running.update(slots)
        for slot in slots:
            slot.add_done_callback(self._running.discard)
        duration_s = self._settings.duration_s
        if duration_s is None:
            await asyncio.gather(*slots)
            return
        end_s = self._start_s + self._settings.warm_up_s + duration_s
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))

    async def _slot(self, indices: Iterator[int]) -> None:
        for index in indices:
            request = self._client.encode(index, self._prompts.prompt(index))
            # A sleep may end slightly early, but no request is due before the start.
            now_s = max(time.perf_counter(), self._start_s)
            if self._is_over(now_s):
                return
            exchange = self._exchange(index, now_s)
            await self._one(request, exchange)
            if exchange.error:
                # Avoid thousands of requests a second to a server that refuses at once.
                await asyncio.sleep(_REFUSED_PAUSE_S)

    def _is_over(self, now_s: float) -> bool:
        duration_s = self._settings.duration_s
        return duration_s is not None and now_s >= (
            self._start_s + self._settings.warm_up_s + duration_s
        )

    def _indices(self) -> range:
        settings = self._settings
        end = settings.num_requests if settings.num_requests is not None else 1 << 62
        return range(self._share.rank, end, settings.num_processes)

    async def _one(self, request: bytes, exchange: ClientExchange) -> None:
        await self._client.run(request, exchange)
        self._num_ended += 1
        self._num_parts += len(exchange.parts_s)
        self._num_failed += bool(exchange.error)

    def _exchange(self, index: int, due_s: float) -> ClientExchange:
        exchange = ClientExchange(index, due_s, asyncio.get_running_loop())
        self._exchanges.append(exchange)
        return exchange

    # Communication with the parent.

    def _on_message(self) -> None:
        try:
            self._pipe.recv_bytes()
        except EOFError:
            # The parent is gone and cannot receive the outcome.
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._stopped.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            progress = LoadProgress(
                len(self._exchanges), self._num_ended, self._num_failed, self._num_parts
            )
            self._pipe.send_bytes(msgspec.msgpack.encode(progress))


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as allowed; return the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
