"""Cost of a token in each process on its way from the engine to a client's socket.

    python -m benchmarks.system --only token_path [--streams 1 8 32] [--requests 4] [--json FILE]

``millrace up`` serves a Llama of 100M parameters with random weights over HTTP. Each load is
``--requests`` requests a stream, 128 tokens in and 64 out, after a warm-up. Prints by process the
CPU time (user and system), voluntary context switches a token and the share of the machine, and
the client's own cost. The ceiling is tokens per second if the engine had all CPU time.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.peers.loads import Load, distinct
from benchmarks.peers.servers import completions
from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.model import write_100m
from benchmarks.support.processes import Reading, in_new_process, read
from benchmarks.support.sse_load import COMPLETIONS, run_load
from tests.support.system import System

_PORT = "18711"
_ENGINE = "workers.process.engine_process"
_CLIENT = "(this client)"


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a load's cost in one process."""

    role: str
    cpu_us_per_token: float
    switches_per_token: float
    core_percent: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a load: the client's rate, and the processes, busiest first."""

    streams: int
    tokens_per_s: float
    busy_cores: float
    shares: list[Share]


def shares(
    before: dict[int, Reading], after: dict[int, Reading], num_tokens: int, wall_s: float
) -> list[Share]:
    """Return shares by role, summed over processes; processes that ended meanwhile are left out."""
    totals: dict[str, list[float]] = {}
    for pid in before.keys() & after.keys():
        total = totals.setdefault(after[pid].role, [0.0, 0.0])
        total[0] += after[pid].cpu_s - before[pid].cpu_s
        total[1] += after[pid].num_switches - before[pid].num_switches
    return sorted(
        (
            Share(
                role=role,
                cpu_us_per_token=cpu_s / num_tokens * 1e6,
                switches_per_token=switches / num_tokens,
                core_percent=100 * cpu_s / wall_s,
            )
            for role, (cpu_s, switches) in totals.items()
        ),
        key=lambda share: -share.cpu_us_per_token,
    )


def _measured(system: System, model: str, load: Load, vocab_size: int) -> Cost:
    client = psutil.Process(os.getpid())

    def bodies(run: int) -> list[dict[str, Any]]:
        return completions(model, load, load.prompts(run, vocab_size))

    asyncio.run(run_load(system.http, bodies(0)[: load.streams], load.streams, COMPLETIONS))
    processes = [client, *system.processes()]
    sent = bodies(1)
    before, begin_s = read(processes), time.perf_counter()
    result = asyncio.run(run_load(system.http, sent, load.streams, COMPLETIONS))
    wall_s = time.perf_counter() - begin_s
    after = read(processes)
    after[client.pid] = msgspec.structs.replace(after[client.pid], role=_CLIENT)
    num_tokens = sum(request.num_tokens for request in result.requests)
    listed = shares(before, after, num_tokens, wall_s)
    return Cost(
        streams=load.streams,
        tokens_per_s=num_tokens / wall_s,
        busy_cores=sum(share.core_percent for share in listed) / 100,
        shares=listed,
    )


def _print(cost: Cost) -> None:
    cores = os.cpu_count() or 1
    print(
        f"\n{cost.streams} streams: {cost.tokens_per_s:.1f} tokens/s, "
        f"{cost.busy_cores:.2f} of {cores} cores busy"
    )
    cells = [
        (
            *(share.role, f"{share.cpu_us_per_token:.1f}"),
            *(f"{share.switches_per_token:.2f}", f"{share.core_percent:.1f}"),
        )
        for share in cost.shares
    ]
    print(table(("process", "CPU us/token", "switches/token", "% of a core"), cells))
    engine_us = sum(s.cpu_us_per_token for s in cost.shares if s.role == _ENGINE)
    print(f"ceiling if the engine had all CPU time: {cores * 1e6 / engine_us:.1f} tokens/s")


def run(
    streams: Sequence[int] = (1, 8, 32), requests: int = 4, model: Path | None = None
) -> PartResult:
    """Send ``requests`` requests in each stream; ``model`` is a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint = model or in_new_process(write_100m, Path(name) / "llama-100m")
        vocab_size = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
        options = ("--port", _PORT, "--model", str(checkpoint))
        system = System(Path(name) / "data", options).start()
        try:
            costs = [
                _measured(system, checkpoint.name, distinct(n, n * requests), vocab_size)
                for n in streams
            ]
        finally:
            system.stop()
    for cost in costs:
        _print(cost)
    return PartResult({"loads": costs})
