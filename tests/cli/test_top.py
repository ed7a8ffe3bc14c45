"""``millrace top``: its output, and the terminal's settings after it ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.cli.main import main
from millrace.cli.top.view import Snapshot, TenantRow, Totals, WorkerRow, as_text, view
from millrace.runtime.text_table import plain_text
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import (
    QueueStatus,
    TelemetryAnswer,
    TelemetryQuery,
    WorkerStatus,
)
from millrace.schemas.jobs import Tier
from millrace.schemas.models.adapters import LoadedAdapter
from tests.support.servers import NatsServer, free_port

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
DRAWN = b"\x1b[1;1H"  # each drawing begins in the upper left corner
WORKER = WorkerStatus(
    worker_id="w-1-life",
    name="worker-1",
    model="demo",
    max_num_sequences=64,
    num_running=16,
    num_waiting=3,
    num_blocks=1_000,
    num_free_blocks=250,
    decode_step_ms=8.46,
)
QUEUE = QueueStatus(
    model="demo",
    num_queued=1_234,
    bound=2_000,
    num_workers=1,
    oldest_wait_s=2.46,
    desired_workers=4,
    ttft_ms={Tier.PRO: 41.6, Tier.FREE: 120.0},
)
TOTALS = Totals(
    requests=120,
    done=90,
    shed=24,
    failed=6,
    prompt_tokens=6_000,
    cached_tokens=1_500,
    completion_tokens=60_000,
    ttft_p50_ms=9.04,
    ttft_p95_ms=180.4,
    ttft_p99_ms=12_345.0,
)
TENANT = TenantRow(tenant="acme", requests=60, other=2, prompt_tokens=6_000, completion_tokens=300)
SNAPSHOT = Snapshot(
    at_s=1_795_285_203.0,
    place="127.0.0.1:4222",
    window_s=60,
    totals=TOTALS,
    tenants=(TENANT,),
    queues=(QUEUE,),
    workers=(WORKER,),
    samples=(WorkerRow(worker="w-1-life", busy_share=0.874),),
)


def test_a_snapshot_as_text() -> None:
    assert as_text(view(SNAPSHOT)).splitlines() == [
        "millrace top  127.0.0.1:4222  2026-11-21 18:20:03 UTC",
        "requests  2.00/s over 60 s: done 1.50, shed 0.40, failed 0.10",
        "tokens    1,000/s out, 100/s in, 25% cached",
        "TTFT      p50 9.0 ms   p95 180 ms   p99 12.3 s",
        "TPOT      p50 -   p95 -   p99 -",
        "",
        "MODEL  QUEUED  BOUND  OLDEST  WORKERS  WANTED  TTFT NEXT",
        "demo    1,234  2,000   2.5 s        1       4      42 ms",
        "",
        "WORKER    MODEL  BATCH            WAITING   KV            BUSY              STEP",
        "worker-1  demo   16/64  ██░░░░░░        3  75%  ██████░░   87%  ███████░  8.5 ms",
        "",
        "TENANT  REQ/S  NOT DONE  OUT TOK/S  IN TOK/S  TTFT P95",
        "acme     1.00         2        5.0       100         -",
    ]


def test_adapters_are_counted_where_a_worker_takes_them() -> None:
    loaded = (LoadedAdapter(name="sql", version="v1"), LoadedAdapter(name="tone", version="v1"))
    takes = structs.replace(WORKER, name="worker-2", adapters=loaded, max_adapters=20)
    shown = as_text(view(structs.replace(SNAPSHOT, workers=(takes, WORKER)))).splitlines()
    heading = next(number for number, line in enumerate(shown) if line.startswith("WORKER"))
    assert [line.split()[-1] for line in shown[heading : heading + 3]] == ["ADAPTERS", "-", "2/20"]


def test_devices_are_counted_where_a_worker_has_several() -> None:
    group = structs.replace(WORKER, name="worker-2", num_devices=4)
    shown = as_text(view(structs.replace(SNAPSHOT, workers=(group, WORKER)))).splitlines()
    heading = next(number for number, line in enumerate(shown) if line.startswith("WORKER"))
    assert [line.split()[-1] for line in shown[heading : heading + 3]] == ["DEVICES", "1", "4"]


def test_what_is_missing_is_said() -> None:
    empty = Snapshot(at_s=0.0, place="x", window_s=60, problems=("No figures of telemetry: away",))
    assert as_text(view(empty)).splitlines()[1:] == [
        "No figures of telemetry: away",
        "",
        "no scheduler was heard of",
        "",
        "no worker was heard of",
    ]


def test_names_cannot_command_the_terminal() -> None:
    """The name of a tenant or a worker is untrusted text."""
    nasty = Snapshot(
        at_s=0.0,
        place="x",
        window_s=60,
        totals=TOTALS,
        tenants=(
            TenantRow(
                tenant="\x1b[2Jhi\n\x9b", requests=1, other=0, prompt_tokens=0, completion_tokens=0
            ),
        ),
    )
    shown = as_text(view(nasty))
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2Jhi\\n" in shown


@pytest.mark.parametrize(
    ("problem", "width", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("你好吗", 5, "你好…"),
        ("你好", 3, "你…"),
    ],
)
def test_lines_are_cut_to_the_width(problem: str, width: int, expected: str) -> None:
    snapshot = Snapshot(at_s=0.0, place="x", window_s=60, problems=(problem,))
    assert plain_text(*view(snapshot), width=width).splitlines()[1] == expected


# --- on a bus, with what a scheduler, a worker and telemetry say ---------------------------------


@contextlib.asynccontextmanager
async def system(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await nats.connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)

    async def answer(query: TelemetryQuery) -> TelemetryAnswer:
        rows: Any = {
            "totals": [{"requests": 120, "done": 120, "unknown": 1, "ttft_p50_ms": None}],
            "top_tenants": [
                {
                    "tenant": "acme",
                    "requests": "120",
                    "other": 0,
                    "prompt_tokens": 0,
                    "completion_tokens": 0,
                }
            ],
            "workers_now": [{"worker": "w-1-life", "busy_share": 0.5, "name": "worker-1"}],
        }[query.name]
        return TelemetryAnswer(rows_json=json.dumps(rows).encode())

    async def beat() -> None:
        while True:
            await bus.workers.announce(WORKER)
            await bus.control.publish_queue_status(QUEUE)
            await asyncio.sleep(0.1)

    subscription = await bus.control.serve_telemetry(answer)
    beating = asyncio.create_task(beat())
    try:
        yield bus
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        await subscription.close()
        await bus.close()


def command(server: NatsServer, *more: str) -> list[str]:
    return [sys.executable, "-m", "millrace.cli", "top", "--nats", server.url, *more]


async def test_once_as_plain_text(nats_server: NatsServer) -> None:
    async with system(nats_server):
        ran = await asyncio.to_thread(
            subprocess.run, command(nats_server), capture_output=True, text=True, check=False
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert "requests  2.00/s over 60 s: done 2.00" in ran.stdout
    assert re.search(r"demo +1,234 +2,000", ran.stdout)
    assert re.search(r"worker-1 .*16/64.* 50%", ran.stdout)
    assert re.search(r"acme +2\.00", ran.stdout)


@pytest.mark.usefixtures("nats_config")  # without what other tests announced
async def test_a_bus_on_which_nothing_runs(nats_server: NatsServer) -> None:
    before = await nats.connect(NatsConfig(url=nats_server.url), "test", part=Part.SCHEDULER)
    await before.close()
    ran = await asyncio.to_thread(
        subprocess.run, command(nats_server, "--once"), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0
    assert "No figures of telemetry" in ran.stdout
    assert "no worker was heard of" in ran.stdout


def test_where_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--data", str(tmp_path)]) == 2
    assert "Nothing runs on" in capsys.readouterr().err
    assert main(["top", "--interval", "0", "--nats", f"nats://127.0.0.1:{free_port()}"]) == 2
    assert "--interval must be at least" in capsys.readouterr().err


class OnTerminal:
    """Command on a separate terminal, whose settings a test can read afterwards."""

    def __init__(self, server: NatsServer, *more: str) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(24, 100)
        self.before = self.settings()
        self.output = b""
        environment = {**os.environ, "NO_COLOR": ""}
        self.process = subprocess.Popen(
            command(server, "--interval", "0.2", *more),
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            env=environment,
        )

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read_until(self, holds: Callable[[bytes], bool], timeout_s: float = 15.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds(self.output):
            assert time.monotonic() < deadline_s, self.output
            if select.select([self._master], [], [], 0.05)[0]:
                self.output += os.read(self._master, 65_536)

    def ends(self) -> int:
        """The exit code, after the last of the output."""
        deadline_s = time.monotonic() + 15.0
        while self.process.poll() is None or select.select([self._master], [], [], 0.05)[0]:
            assert time.monotonic() < deadline_s, self.output
            if select.select([self._master], [], [], 0.05)[0]:
                self.output += os.read(self._master, 65_536)
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@contextlib.contextmanager
def on_terminal(server: NatsServer) -> Iterator[OnTerminal]:
    terminal = OnTerminal(server)
    try:
        yield terminal
    finally:
        terminal.close()


def interrupt(number: signal.Signals) -> Callable[[OnTerminal], None]:
    return lambda terminal: terminal.process.send_signal(number)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda terminal: terminal.type(b"q"), 0),
        (lambda terminal: terminal.type(b"xQ"), 0),
        (lambda terminal: terminal.type(b"\x03"), 130),
        (interrupt(signal.SIGINT), 130),
        (interrupt(signal.SIGTERM), 143),
        (interrupt(signal.SIGHUP), 129),
        (interrupt(signal.SIGQUIT), 131),
    ],
    ids=["q", "Q", "^C", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"],
)
async def test_the_terminal_is_left_as_it_was(
    nats_server: NatsServer, end: Callable[[OnTerminal], None], code: int
) -> None:
    def use() -> None:
        with on_terminal(nats_server) as terminal:
            terminal.read_until(lambda shown: b"worker-1" in shown)
            assert terminal.output.startswith(ENTER)
            assert terminal.settings() != terminal.before
            end(terminal)
            assert terminal.ends() == code
            assert terminal.settings() == terminal.before
            assert terminal.output.endswith(LEAVE + b"\x1b[?25h")
            assert b"Traceback" not in terminal.output

    async with system(nats_server):
        await asyncio.to_thread(use)


async def test_it_refreshes_resizes_and_can_be_suspended(nats_server: NatsServer) -> None:
    def use() -> None:
        with on_terminal(nats_server) as terminal:
            terminal.read_until(lambda shown: shown.count(DRAWN) >= 3)
            # A line that is as wide as the terminal: the title.
            assert max(map(len, _titles(terminal.output))) == 100
            terminal.resize(8, 60)
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.read_until(lambda shown: any(len(title) == 60 for title in _titles(shown)))
            terminal.read_until(lambda shown: b"more lines" in shown)
            terminal.type(b"\x1a")
            terminal.read_until(lambda shown: LEAVE in shown)
            os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
            assert terminal.settings() == terminal.before
            terminal.process.send_signal(signal.SIGCONT)
            terminal.read_until(lambda shown: DRAWN in shown.rpartition(LEAVE)[2])
            terminal.type(b"q")
            assert terminal.ends() == 0
            assert terminal.settings() == terminal.before

    async with system(nats_server):
        await asyncio.to_thread(use)


def _titles(shown: bytes) -> list[bytes]:
    return re.findall(rb"\x1b\[7m(.*?)\x1b\[0m", shown)


async def test_a_bus_that_goes_away_is_told(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()

    def use() -> None:
        with on_terminal(server) as terminal:
            terminal.read_until(lambda shown: b"worker-1" in shown)
            server.kill()
            terminal.read_until(lambda shown: b"The message bus is unreachable" in shown)
            terminal.type(b"q")
            assert terminal.ends() == 0
            assert terminal.settings() == terminal.before

    async with system(server):
        await asyncio.to_thread(use)
        server.start()
    server.stop()
