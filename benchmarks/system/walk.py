"""Cost of the whole path compared with the engine alone.

    python -m benchmarks.system --only walk

Starts ``millrace up`` with the demo model and sends closed loops of 1, 8 and 32 streaming clients
through gateway, queue, scheduler, worker and back. In the same run, ``millrace generate`` answers
the same prompts on the engine alone: once with all cores, once with a worker's number of threads,
which leaves the other cores to the rest of the path. Prints tokens/s, TTFT, the path's share (of
the engine's throughput, at the clients) and the added TTFT.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.command import PartResult
from benchmarks.support.sse_load import LoadResult, run_load
from millrace.engine.threads.choice import default_num_threads, usable_cores
from tests.support.system import System

CLIENTS = (1, 8, 32)
_QUESTIONS = (
    "What is TTFT?",
    "What happens when a worker dies?",
    "How do I publish a job?",
    "What is continuous batching?",
    "Why does Millrace use NATS?",
    "What does a scheduler do?",
    "What is a KV cache?",
    "How is the cost of a request computed?",
)


def _requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": _QUESTIONS[i % len(_QUESTIONS)]}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


def _engine_alone(
    folder: Path, requests: list[dict[str, Any]], batch: int, num_threads: int | None = None
) -> dict[str, float]:
    """Return the summary of ``millrace generate`` for these requests, ``batch`` at a time."""
    lines = (json.dumps({"id": str(i), **request}) for i, request in enumerate(requests))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "millrace.cli", "generate", "--model", "demo"),
            *("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")),
            *("--max-batch", str(batch)),
        ],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **threads},
    )
    summary = json.loads(finished.stderr.strip().splitlines()[-1])
    assert isinstance(summary, dict)
    return summary


async def _through_the_path(url: str, requests: list[dict[str, Any]], clients: int) -> LoadResult:
    bodies = [{"model": "demo", **request} for request in requests]
    await run_load(url, bodies[:clients], clients)
    return await run_load(url, bodies, clients)


def _measure(folder: Path, clients: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Return the medians of a few rounds, in each of which all are measured in turn."""
    requests = _requests(max(16, 4 * clients), max_tokens)
    worker_threads = default_num_threads(usable_cores(), shared=True)
    alone, alone_shared, path = [], [], []
    for _ in range(rounds):
        alone.append(_engine_alone(folder, requests, clients))
        alone_shared.append(_engine_alone(folder, requests, clients, worker_threads))
        system = System(folder / "data", ("--port", "18600")).start()
        try:
            path.append(asyncio.run(_through_the_path(system.http, requests, clients)))
        finally:
            system.stop()
    engine = statistics.median(run["tokens_per_s"] for run in alone)
    engine_shared = statistics.median(run["tokens_per_s"] for run in alone_shared)
    whole = statistics.median(run.tokens_per_s for run in path)
    engine_ttft = statistics.median(run["p50_ttft_ms"] for run in alone_shared)
    path_ttft = statistics.median(run.ttft_percentile_ms(0.5) for run in path)
    return {
        "clients": clients,
        "engine_tokens_per_s": engine,
        "engine_worker_threads_tokens_per_s": engine_shared,
        "path_tokens_per_s": whole,
        "path_share": whole / engine,
        "path_share_of_worker_threads": whole / engine_shared,
        "engine_ttft_p50_ms": engine_ttft,
        "path_ttft_p50_ms": path_ttft,
        "path_ttft_p95_ms": statistics.median(run.ttft_percentile_ms(0.95) for run in path),
        "added_ttft_p50_ms": path_ttft - engine_ttft,
    }


def run(max_tokens: int = 128, rounds: int = 3) -> PartResult:
    """Generate ``max_tokens`` per answer; report the median of ``rounds``."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for clients in CLIENTS:
            rows.append(_measure(Path(name), clients, max_tokens, rounds))
            print(_line(rows[-1]), flush=True)
    return PartResult(rows, file="walk.json")


def _line(row: dict[str, float]) -> str:
    return (
        f"{row['clients']:>3.0f} clients: engine alone {row['engine_tokens_per_s']:.0f} tokens/s "
        f"(with a worker's threads {row['engine_worker_threads_tokens_per_s']:.0f}), "
        f"whole path {row['path_tokens_per_s']:.0f} = {row['path_share']:.0%} "
        f"({row['path_share_of_worker_threads']:.0%}); TTFT p50 {row['path_ttft_p50_ms']:.1f} ms, "
        f"p95 {row['path_ttft_p95_ms']:.1f} ms, "
        f"engine alone p50 {row['engine_ttft_p50_ms']:.1f} ms, "
        f"added {row['added_ttft_p50_ms']:.1f} ms"
    )
