"""Thousands of mixed requests through ``millrace generate`` on a pool of a tenth of their blocks.

    python -m benchmarks.soak [--requests 10000] [--limit-s 900]

Prints the result. Exits with 1 if a request has an unexpected end, the process's memory grows,
blocks leak, or the time is up.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LlamaShape, write_llama
from benchmarks.soak.requests import LONGEST_TOKENS, Drawer, Expected, problems, twins
from benchmarks.support.command import PartResult, run_command

SHAPE = LlamaShape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    vocab_size=1_024,
    context_window_tokens=8_192,
)
BLOCK_SIZE_TOKENS = 16
MAX_BATCH = 128
POOL_SHARE = 0.1
HOST_CACHE_BYTES = 4 << 20
MAX_GROWTH = 0.05
_WARM_UP_SHARE = 0.3
_SAMPLE_S = 0.25
_MAX_SHOWN = 20


@dataclass(frozen=True)
class GenerateRun:
    """Completed run; ``rss_bytes`` are samples at equal intervals."""

    exit_code: int
    summary: dict[str, Any]
    answers: list[dict[str, Any]]
    rss_bytes: list[int]
    wall_s: float


class SoakError(Exception):
    """Failure to complete a run; the message has the reason."""


def num_blocks(requests: Sequence[Expected]) -> int:
    """Return a tenth of the blocks that a full batch needs on average, at least the longest's."""
    mean = statistics.fmean(_blocks(request) for request in requests)
    longest = math.ceil(LONGEST_TOKENS / BLOCK_SIZE_TOKENS)
    return max(longest + 1, round(MAX_BATCH * mean * POOL_SHARE))


def _blocks(request: Expected) -> int:
    fields = request.fields
    if request.error_code:
        return 0
    num_tokens = len(fields["prompt_token_ids"]) + int(fields["max_tokens"])
    return int(fields.get("n", 1)) * math.ceil(num_tokens / BLOCK_SIZE_TOKENS)


def run(folder: Path, requests: Sequence[Expected], blocks: int, limit_s: float) -> GenerateRun:
    """Run the requests in a separate process. Raises SoakError."""
    model = write_llama(folder / "model", SHAPE)
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(request.fields) + "\n" for request in requests))
    command = [
        *(
            sys.executable,
            "-m",
            "millrace.cli",
            "generate",
            "--model",
            str(model),
            "--answer-bad-lines",
        ),
        *("--input", str(source), "--output", str(target)),
        *("--max-batch", str(MAX_BATCH), "--num-blocks", str(blocks), "--dtype", "float32"),
        # The cache is full after some hundred requests; growth before that is no leak.
        *("--host-cache-bytes", str(HOST_CACHE_BYTES)),
        # Such a small model gains nothing from a second thread.
        *("--threads", "1"),
    ]
    began = time.monotonic()
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            samples = _watch(process, began + limit_s)
        finally:
            process.kill()
            process.wait()
        wall_s = time.monotonic() - began
        log.seek(0)
        shown = log.read()
    if wall_s >= limit_s:
        raise SoakError(f"not through after {limit_s:g} s:\n{shown[-2000:]}")
    try:
        summary = json.loads(shown.splitlines()[-1])
    except (ValueError, IndexError):
        raise SoakError(f"it ended without a summary:\n{shown[-4000:]}") from None
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    return GenerateRun(process.returncode, summary, answers, samples, wall_s)


def _watch(process: subprocess.Popen[bytes], deadline: float) -> list[int]:
    """Sample memory until the process has ended or the time is up."""
    watched, samples = psutil.Process(process.pid), list[int]()
    while time.monotonic() < deadline:
        try:
            process.wait(_SAMPLE_S)
        except subprocess.TimeoutExpired:
            samples.append(watched.memory_info().rss)
        else:
            break
    return samples


def growth(rss_bytes: Sequence[int]) -> float:
    """Return the share by which memory grew from the warm-up to the end."""
    warm = rss_bytes[int(len(rss_bytes) * _WARM_UP_SHARE) :]
    tenth = max(1, len(warm) // 10)
    return statistics.median(warm[-tenth:]) / statistics.median(warm[:tenth]) - 1


def findings(requests: Sequence[Expected], ran: GenerateRun) -> list[str]:
    """List the violations of a run."""
    found = list(problems(requests, ran.answers))
    num_bad = sum(bool(request.error_code) for request in requests)
    if ran.summary["num_failed"] != num_bad:
        found.append(f"{ran.summary['num_failed']} requests failed, {num_bad} had to")
    if ran.exit_code != (1 if num_bad else 0):
        found.append(f"the exit code is {ran.exit_code}")
    return found


def soak(requests: int = 10_000, seed: int = 0, limit_s: float = 900.0) -> PartResult:
    """Run the requests for at most ``limit_s``."""
    drawn = draw(requests, seed)
    blocks = num_blocks(drawn)
    with tempfile.TemporaryDirectory() as folder:
        try:
            ran = run(Path(folder), drawn, blocks, limit_s)
        except SoakError as error:
            sys.exit(str(error))
    found = findings(drawn, ran)
    grown = growth(ran.rss_bytes)
    if grown > MAX_GROWTH:
        found.append(f"memory grew by {grown:.1%} after the warm-up")
    _report(drawn, ran, blocks, grown)
    for line in found[:_MAX_SHOWN]:
        print(f"WRONG: {line}")
    print(f"{len(found)} checks failed" if found else "all checks passed")
    return PartResult(found, not found)


def draw(count: int, seed: int) -> list[Expected]:
    """Draw requests for the model of this benchmark."""
    pool_tokens = BLOCK_SIZE_TOKENS * 256
    drawer = Drawer(
        seed,
        vocab_size=SHAPE.vocab_size,
        first_token=FIRST_TEXT_TOKEN,
        pool_tokens=pool_tokens,
        context_tokens=SHAPE.context_window_tokens,
    )
    return drawer.draw(count)


def _report(requests: Sequence[Expected], ran: GenerateRun, blocks: int, grown: float) -> None:
    summary, mib = ran.summary, 1 << 20
    pairs = list(twins(requests, ran.answers))
    same = sum(one == other for one, other in pairs)
    print(
        f"{len(requests)} requests in {ran.wall_s:.0f} s on {blocks} blocks of "
        f"{BLOCK_SIZE_TOKENS} tokens: {summary['prompt_tokens']} prompt tokens "
        f"({summary['prefix_hit_tokens']} found in the cache), {summary['completion_tokens']} "
        f"completion tokens, {summary['tokens_per_s']} a second\n"
        f"{summary['num_cancelled']} cancelled, {summary['num_failed']} failed as asked, "
        f"{summary['num_preemptions']} preemptions\n"
        f"{same} of {len(pairs)} completions were the same again in other company\n"
        f"memory: {ran.rss_bytes[len(ran.rss_bytes) // 2] / mib:.0f} MiB half way, "
        f"{summary['peak_rss_bytes'] / mib:.0f} MiB at most, {grown:+.1%} after the warm-up"
    )


if __name__ == "__main__":
    raise SystemExit(run_command("soak", soak, __doc__))
