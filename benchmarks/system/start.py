"""Seconds from process start to the first token of the demo model.

    python -m benchmarks.system --only start [--runs 5] [--system] [--imports]

A process loads the demo model and answers one request with one token, like ``millrace generate``;
the goal is 3 s. ``--system`` measures ``millrace up``, from its start to the first token over HTTP.
``--imports`` shows import times.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.support.sse_load import run_load
from tests.support.system import System

_GOAL_S = 3.0
_REQUEST = {"messages": [{"role": "user", "content": "What is TTFT?"}], "max_tokens": 1}
_IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")
_NUM_SHOWN = 15
_PORT = "18700"


def first_token_s(folder: Path) -> float:
    """Return the seconds from the start of ``millrace generate`` to its summary after one token."""
    begin_s = time.perf_counter()
    with subprocess.Popen(
        _generate(folder), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.lstrip().startswith(b"{"):
                elapsed_s = time.perf_counter() - begin_s
                assert json.loads(line)["completion_tokens"] == 1
                return elapsed_s
    raise RuntimeError("millrace generate ended without a summary")


def system_first_token_s(folder: Path) -> tuple[float, float]:
    """Return the seconds from ``millrace up`` until it is ready, and until a client has a token."""
    begin_s = time.perf_counter()
    system = System(folder / "data", ("--port", _PORT)).start()
    try:
        ready_s = time.perf_counter() - begin_s
        asyncio.run(run_load(system.http, [{"model": "demo", **_REQUEST}], 1))
        return ready_s, time.perf_counter() - begin_s
    finally:
        system.stop()


def import_times_ms(lines: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Parse the output of ``python -X importtime``.

    Returns each top-level package's total own time, and the cumulative time of each of our modules.
    """
    own_ms: dict[str, float] = defaultdict(float)
    cumulative_ms: dict[str, float] = {}
    for line in lines:
        match = _IMPORT_LINE.match(line)
        if match is None:
            continue
        own_us, total_us, _, name = match.groups()
        package = name.partition(".")[0]
        own_ms[package] += int(own_us) / 1e3
        if package == "millrace":
            cumulative_ms[name] = int(total_us) / 1e3
    return dict(own_ms), cumulative_ms


def _generate(folder: Path, *options: str) -> list[str]:
    files = ("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"))
    return [sys.executable, *options, "-m", "millrace.cli", "generate", "--model", "demo", *files]


def _print_imports(folder: Path) -> None:
    finished = subprocess.run(
        _generate(folder, "-X", "importtime"), check=True, capture_output=True, text=True
    )
    own_ms, cumulative_ms = import_times_ms(finished.stderr.splitlines())
    print(f"imports take {sum(own_ms.values()):.0f} ms (timing slows them down):")
    for name, ms in _largest(own_ms):
        print(f"  {ms:7.1f} ms in {name}")
    print("our modules, including modules that they are the first to import:")
    for name, ms in _largest(cumulative_ms):
        print(f"  {ms:7.1f} ms by {name}")


def _largest(times_ms: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times_ms.items(), key=lambda item: -item[1])[:_NUM_SHOWN]


def run(runs: int = 5, system: bool = False, imports: bool = False) -> None:
    """Report the median of ``runs``; ``system`` also starts millrace up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text(json.dumps({"id": "1", **_REQUEST}) + "\n")
        first_token_s(folder)  # reads the files into memory
        times_s = [first_token_s(folder) for _ in range(runs)]
        print(
            f"start to first token: median {statistics.median(times_s):.2f} s, least "
            f"{min(times_s):.2f}, most {max(times_s):.2f} (goal: at most {_GOAL_S:.0f})"
        )
        if system:
            starts = [system_first_token_s(folder) for _ in range(runs)]
            ready_s, token_s = (statistics.median(column) for column in zip(*starts, strict=True))
            print(f"millrace up: ready after {ready_s:.2f} s, first token after {token_s:.2f} s")
        if imports:
            _print_imports(folder)
