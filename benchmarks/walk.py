"""What the whole path costs beside the engine alone.

    python -m benchmarks.walk

Starts ``millrace up`` with the demo model, sends closed loops of 1, 8 and 32 streaming clients
through gateway, queue, scheduler, worker and back, and runs the same prompts by ``millrace
generate`` on the engine alone, in one run on one machine. Prints tokens/s, TTFT and the path's
share: the part of the engine's own throughput that arrives at the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sse_load import LoadResult, run_load
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


def _engine_alone(folder: Path, requests: list[dict[str, Any]], batch: int) -> dict[str, float]:
    """The summary that ``millrace generate`` prints for these requests, ``batch`` at a time."""
    lines = (json.dumps({"id": str(i), **request}) for i, request in enumerate(requests))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "cli", "generate", "--model", "demo"),
            *("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")),
            *("--max-batch", str(batch)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    summary = json.loads(finished.stderr.strip().splitlines()[-1])
    assert isinstance(summary, dict)
    return summary


async def _through_the_path(url: str, requests: list[dict[str, Any]], clients: int) -> LoadResult:
    bodies = [{"model": "demo", **request} for request in requests]
    await run_load(url, bodies[:clients], clients)
    return await run_load(url, bodies, clients)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; the median counts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for clients in CLIENTS:
            requests = _requests(max(16, 4 * clients), arguments.max_tokens)
            alone, path = [], []
            for _ in range(arguments.rounds):
                alone.append(_engine_alone(folder, requests, clients))
                system = System(folder / "data", ("--port", "18600")).start()
                try:
                    path.append(asyncio.run(_through_the_path(system.http, requests, clients)))
                finally:
                    system.stop()
            alone.sort(key=lambda run: run["tokens_per_s"])
            path.sort(key=lambda run: run.tokens_per_s)
            rows.append(_row(clients, alone[len(alone) // 2], path[len(path) // 2]))
            print(_line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def _row(clients: int, alone: dict[str, float], path: LoadResult) -> dict[str, float]:
    return {
        "clients": clients,
        "engine_tokens_per_s": alone["tokens_per_s"],
        "path_tokens_per_s": path.tokens_per_s,
        "path_share": path.tokens_per_s / alone["tokens_per_s"],
        "engine_ttft_ms": alone["mean_ttft_ms"],
        "path_ttft_p50_ms": path.ttft_percentile_ms(0.5),
        "path_ttft_p95_ms": path.ttft_percentile_ms(0.95),
    }


def _line(row: dict[str, float]) -> str:
    return (
        f"{row['clients']:>3.0f} clients: "
        f"engine alone {row['engine_tokens_per_s']:>7.0f} tokens/s, "
        f"whole path {row['path_tokens_per_s']:>7.0f} ({row['path_share']:.0%}); "
        f"TTFT p50 {row['path_ttft_p50_ms']:.1f} ms, p95 {row['path_ttft_p95_ms']:.1f} ms "
        f"(engine alone {row['engine_ttft_ms']:.1f} ms)"
    )


if __name__ == "__main__":
    main()
