"""CPU time, wake-ups and memory of each process of an idle system.

    python -m benchmarks.system --only idle [--seconds 60] [--settle 60] [--requests 1]

``millrace up`` starts with the demo model, answers ``--requests`` short requests, so that every
part has worked once, and rests for ``--settle`` seconds. Then CPU time (user and system) and
voluntary context switches of all its processes are counted for ``--seconds``. The goal is 1 % of a
core in total. RSS counts shared pages in each process; PSS divides them, so the sum of PSS is the
system's memory. The ceiling is a Python process that only sleeps.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.processes import Reading, read
from benchmarks.support.sse_load import run_load
from tests.support.system import System

_GOAL_CORE_PERCENT = 1.0
_REQUEST = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is TTFT?"}],
    "max_tokens": 8,
}
_PORT = "18710"
_SLEEPER = "import time; time.sleep(3600)"


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Process at rest: ``core_percent`` of one core, voluntary switches per second, memory."""

    role: str
    core_percent: float
    switches_per_s: float
    rss_mib: float
    pss_mib: float


def idle_of(process: psutil.Process, before: Reading, after: Reading, seconds: float) -> Idle:
    """Return the use of one process from one reading to the other."""
    memory = process.memory_full_info()
    return Idle(
        role=after.role,
        core_percent=100 * (after.cpu_s - before.cpu_s) / seconds,
        switches_per_s=(after.num_switches - before.num_switches) / seconds,
        rss_mib=memory.rss / 2**20,
        pss_mib=memory.pss / 2**20,
    )


def measure(processes: Sequence[psutil.Process], seconds: float) -> list[Idle]:
    """Measure the processes; return each one's use, busiest first."""
    before = read(processes)
    begin_s = time.monotonic()
    time.sleep(seconds)
    after = read(processes)
    elapsed_s = time.monotonic() - begin_s
    measured = [
        idle_of(process, before[process.pid], after[process.pid], elapsed_s)
        for process in processes
        if process.pid in before and process.pid in after
    ]
    return sorted(measured, key=lambda idle: -idle.core_percent)


def _print(processes: Sequence[Idle], floor: Idle) -> None:
    columns = ("core_percent", "switches_per_s", "rss_mib", "pss_mib")
    total = Idle(role="all", **{name: sum(getattr(p, name) for p in processes) for name in columns})
    cells = [
        (
            *(idle.role, f"{idle.core_percent:.2f}", f"{idle.switches_per_s:.1f}"),
            *(f"{idle.rss_mib:.0f}", f"{idle.pss_mib:.0f}"),
        )
        for idle in (*processes, total, floor)
    ]
    print(table(("process", "% of a core", "switches/s", "RSS MiB", "PSS MiB"), cells))
    print(f"goal: at most {_GOAL_CORE_PERCENT:g} % of a core in all processes together")


def run(seconds: float = 60.0, settle: float = 60.0, requests: int = 1, up: str = "") -> PartResult:
    """Measure for ``seconds`` after a rest of ``settle``; ``up`` has options of millrace up."""
    with tempfile.TemporaryDirectory() as folder:
        system = System(Path(folder) / "data", ("--port", _PORT, *shlex.split(up))).start()
        try:
            asyncio.run(run_load(system.http, [_REQUEST] * requests, 1))
            time.sleep(settle)
            processes = measure(system.processes(), seconds)
        finally:
            system.stop()
    with subprocess.Popen([sys.executable, "-c", _SLEEPER]) as sleeper:
        time.sleep(1.0)  # until it sleeps
        [floor] = measure([psutil.Process(sleeper.pid)], 5.0)
        sleeper.kill()
    floor = msgspec.structs.replace(floor, role="(a Python that sleeps)")
    _print(processes, floor)
    return PartResult({"processes": processes, "floor": floor})
