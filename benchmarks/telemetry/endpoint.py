"""``endpoint``: check of the ClickHouse endpoint's bounds under load.

Runs nats-server, the embedded Kafka, a publisher of records and ``python -m millrace.telemetry`` as
processes. Twelve clients of five users, each at its own address, query the endpoint without pause
for ``--minutes``: large answers, statements that fail in mid-answer or are refused, sums and sorts
larger than memory, sockets that close early, and light queries of tables. Meanwhile the operations
page's questions are asked through the bus. Prints, and writes with ``--json``, the memory of the
process and of queries, the times of light queries, the page's failures, and the sink's lag: the
time of a request from the outbox to the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import tempfile
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil

from benchmarks.support.command import PartResult
from benchmarks.support.processes import SPAWN, spawned
from benchmarks.telemetry.record_load import record_load, running_kafka
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import GatewayConfig, NatsConfig
from millrace.schemas.control import TelemetryQuery
from tests.support.servers import NatsServer
from tests.support.waiting import eventually
from tests.telemetry.process import PASSWORD, TelemetryProcess
from tests.telemetry.records import request_record

_MIB = 1024 * 1024
_SETTLE_S = 10.0
_REST_S = 30.0
_LIGHT_PAUSE_S = 0.25
_PAGE_PAUSE_S = 0.5
_LOOK_S = 0.25
_LEAVE_S = 0.5
_LAST_BYTES = 4096
_CODE = re.compile(rb"x-clickhouse-exception-code: (\d+)")
_NUMBERS = re.compile(rb"(\d+)\t(\d+)\n")

_EXPORTS = (
    "SELECT number, toString(number) FROM numbers(5000000) FORMAT CSV",
    "SELECT number, toString(number) FROM numbers(2000000) FORMAT JSON",
    "SELECT number, toString(sipHash64(number)) FROM numbers(5000000) FORMAT Parquet",
)
_MISTAKES = (
    "SELECT throwIf(number = 300000) FROM numbers(1000000) FORMAT CSV",
    "SELECT groupArray(number) FROM numbers(40000000)",
)
_REFUSED = (
    "SELEC 1",
    "SELECT nothing FROM requests",
    "INSERT INTO requests (request_id) VALUES ('x')",
    "SELECT repeat('x', 1000000) FROM numbers(2000)",
)
_SUMS = (
    "SELECT sum(sipHash64(number)) FROM numbers(3000000000)",
    "SELECT number, count() AS n FROM numbers(40000000) GROUP BY number ORDER BY n LIMIT 5",
    "SELECT uniqExact(sipHash64(number)) FROM numbers(100000000)",
    "SELECT toString(sipHash64(number)) s FROM numbers(20000000) ORDER BY s LIMIT 9000000, 1",
)
_LIGHT = (
    "SELECT tenant, count(), sum(cost) FROM requests GROUP BY tenant",
    "SELECT count() FROM requests WHERE status = 'failed'",
    "SELECT model_served, quantile(0.95)(total_ms) FROM requests GROUP BY model_served",
)
_PAGE = ("totals", "usage_by_tenant", "latency", "workers_now", "error_codes", "alert_conditions")
_MEMORY = "SELECT max(memory_usage), sum(memory_usage) FROM system.processes"

_GOALS: dict[str, float] = {
    "query_peak_mib": 512,
    "queries_peak_mib": 1024,
    "peak_mib": 2048,
    "kept_mib": 200,
    "light_p95_s": 0.3,
    "light_failures": 0,
    "page_failures": 0,
    "sink_lag_max_s": 5.0,
}


class Figures(msgspec.Struct, kw_only=True):
    """Figures of a run. Memory is the telemetry process's in MiB, except two figures of queries."""

    minutes: float = 0.0
    start_mib: float = 0.0
    peak_mib: float = 0.0
    end_mib: float = 0.0
    kept_mib: float = 0.0
    query_peak_mib: float = 0.0
    queries_peak_mib: float = 0.0
    light_queries: int = 0
    light_p50_s: float = 0.0
    light_p95_s: float = 0.0
    light_max_s: float = 0.0
    light_failures: int = 0
    page_questions: int = 0
    page_failures: int = 0
    page_p95_s: float = 0.0
    sink_lag_max_s: float = 0.0
    load_average: float = 0.0
    outcomes: dict[str, dict[str, int]] = {}

    def missed(self) -> list[str]:
        """List the goals that were missed."""
        return [
            f"{name} is {getattr(self, name):.4g}, goal {goal:g}"
            for name, goal in _GOALS.items()
            if getattr(self, name) > goal
        ]


class Soak:
    """Run of all clients against one telemetry process."""

    def __init__(self, process: TelemetryProcess, bus: Bus) -> None:
        self._bus = bus
        self._port = process.port
        self._clients = Clients(process.port)
        self._memory = psutil.Process(process.pid)
        self._page_s: list[float] = []
        self.figures = Figures()

    async def run(self, seconds: float) -> None:
        await asyncio.sleep(min(_SETTLE_S, seconds))
        self.figures.start_mib = self._resident_mib()
        parts = (
            *(self._clients.ask("light", 6, _LIGHT, pause_s=_LIGHT_PAUSE_S) for _ in range(3)),
            self._ask_page(),
            self._look_at_memory(),
            self._look_at_queries(),
            self._look_at_sink(),
        )
        ours, theirs = SPAWN.Pipe()
        with spawned(heavy, self._port, seconds, theirs):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*parts)
            self.figures.load_average = os.getloadavg()[0]
            outcomes = await asyncio.to_thread(ours.recv)
        await asyncio.sleep(min(_REST_S, seconds))
        self._tell(seconds, outcomes)

    def _tell(self, seconds: float, outcomes: dict[str, dict[str, int]]) -> None:
        figures, light_s = self.figures, self._clients.light_s
        figures.minutes = seconds / 60
        figures.end_mib = self._resident_mib()
        figures.kept_mib = figures.end_mib - figures.start_mib
        figures.light_queries, figures.page_questions = len(light_s), len(self._page_s)
        figures.light_p50_s = _quantile(light_s, 0.5)
        figures.light_p95_s = _quantile(light_s, 0.95)
        figures.light_max_s = max(light_s, default=0.0)
        figures.page_p95_s = _quantile(self._page_s, 0.95)
        light = self._clients.outcomes["light"]
        figures.light_failures = light.total() - light["200"]
        figures.outcomes = {**outcomes, "light": dict(light)}

    async def _ask_page(self) -> None:
        limit_s = GatewayConfig().telemetry_timeout_s
        for name in itertools.cycle(_PAGE):
            began_s = time.monotonic()
            query = TelemetryQuery(name=name, params={})
            answer = await self._bus.control.query_telemetry(query, limit_s)
            self._page_s.append(time.monotonic() - began_s)
            if answer is None or answer.error:
                self.figures.page_failures += 1
                print(f"{name}: {answer.error if answer else 'no answer'}", flush=True)
            await asyncio.sleep(_PAGE_PAUSE_S)

    async def _look_at_memory(self) -> None:
        while True:
            self.figures.peak_mib = max(self.figures.peak_mib, self._resident_mib())
            await asyncio.sleep(_LOOK_S / 5)

    async def _look_at_queries(self) -> None:
        figures = self.figures
        while True:
            _, answer = await self._clients.whole(7, _MEMORY)
            largest, all_of_them = map(int, _NUMBERS.findall(answer)[-1])
            figures.query_peak_mib = max(figures.query_peak_mib, largest / _MIB)
            figures.queries_peak_mib = max(figures.queries_peak_mib, all_of_them / _MIB)
            await asyncio.sleep(_LOOK_S)

    async def _look_at_sink(self) -> None:
        """Measure the time of a request from the outbox to the table."""
        for number in itertools.count():
            name = f"probe-{number}"
            began_s = time.monotonic()
            await self._bus.outbox.publish(
                msgspec.structs.replace(request_record(0), request_id=name)
            )
            stored = f"SELECT throwIf(count() = 0) FROM requests WHERE request_id = '{name}'"
            is_stored = partial(self._is_stored, stored)
            await eventually(is_stored, timeout_s=120.0, what="a record's row", poll_s=_LOOK_S)
            lag_s = time.monotonic() - began_s
            self.figures.sink_lag_max_s = max(self.figures.sink_lag_max_s, lag_s)
            await asyncio.sleep(_LOOK_S)

    async def _is_stored(self, sql: str) -> bool:
        return (await self._clients.whole(7, sql))[0] == "200"

    def _resident_mib(self) -> float:
        return float(self._memory.memory_info().rss) / _MIB


class Clients:
    """Clients of the endpoint, and how their questions ended.

    They read sockets directly, because a client's CPU time would disturb the process under test.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: dict[str, Counter[str]] = {}
        self.light_s: list[float] = []

    async def ask(
        self, kind: str, user: int, statements: tuple[str, ...], *, pause_s: float = 0.0
    ) -> None:
        """Ask in turn, without end."""
        outcomes = self.outcomes.setdefault(kind, Counter())
        for sql in itertools.cycle(statements):
            began_s = time.monotonic()
            outcome, _ = await self.whole(user, sql)
            outcomes[outcome] += 1
            if kind == "light":
                self.light_s.append(time.monotonic() - began_s)
            await asyncio.sleep(pause_s)

    async def leave(self, user: int, sql: str) -> None:
        """Ask and close the socket after half a second, without end."""
        outcomes = self.outcomes.setdefault("left", Counter())
        while True:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    outcome, _ = await self.whole(user, sql)
                    outcomes[outcome] += 1
            except TimeoutError:
                outcomes["left"] += 1

    async def whole(self, user: int, sql: str) -> tuple[str, bytes]:
        """Return how the answer to a statement ended, and its last bytes.

        It ends by its exception's code, cut off, or with 200.
        """
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, local_addr=(f"127.0.1.{user}", 0), limit=_MIB
        )
        head = (
            f"POST /?database=millrace HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            f"X-ClickHouse-Key: {PASSWORD}\r\nContent-Length: {len(sql)}\r\n\r\n"
        )
        try:
            writer.write(f"{head}{sql}".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            last = b""
            while chunk := await reader.read(_MIB):
                last = (last + chunk)[-_LAST_BYTES:]
        except (OSError, asyncio.IncompleteReadError):
            return "cut", b""
        finally:
            writer.close()
        code = _CODE.search(answer)
        if code:
            return code[1].decode(), last
        return ("200", last) if last.endswith(b"0\r\n\r\n") else ("cut", last)


def heavy(port: int, seconds: float, told: Connection) -> None:
    """Run all clients except those of light queries, in a separate process."""

    async def run() -> dict[str, Counter[str]]:
        clients = Clients(port)
        parts = (
            *(clients.ask("export", 2, _EXPORTS[n:] + _EXPORTS[:n]) for n in range(3)),
            clients.ask("mistake", 3, _MISTAKES),
            clients.ask("refused", 3, _REFUSED, pause_s=0.1),
            *(clients.ask("sum", 4, _SUMS[n:] + _SUMS[:n]) for n in (0, 2)),
            clients.leave(5, _EXPORTS[0]),
            clients.leave(5, _SUMS[0]),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*parts)
        return clients.outcomes

    told.send({kind: dict(each) for kind, each in asyncio.run(run()).items()})


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)] if ordered else 0.0


async def measure(directory: Path, seconds: float, rate: float) -> Figures:
    """Start everything and run the soak."""
    with NatsServer(directory / "nats") as server, running_kafka("embedded", directory) as kafka:
        process = TelemetryProcess(directory, server.url, kafka.config, batch_interval_s=1.0)
        process.start()
        bus = await nats.connect(NatsConfig(url=server.url), "soak", part=Part.SCHEDULER)
        try:
            await process.answers()
            with record_load(server.url, rate):
                soak = Soak(process, bus)
                await soak.run(seconds)
        finally:
            await bus.close()
            process.kill()
    return soak.figures


def run(minutes: float = 10.0, rate: float = 100.0, smoke: bool = False) -> PartResult:
    """Publish records at ``rate`` a second."""
    seconds = 4.0 if smoke else 60.0 * minutes
    with tempfile.TemporaryDirectory(prefix="millrace-soak-") as folder:
        figures = asyncio.run(measure(Path(folder), seconds, rate))
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())
    missed = figures.missed()
    print("\n".join(f"missed: {each}" for each in missed) or "all goals met")
    return PartResult(figures, not missed)
