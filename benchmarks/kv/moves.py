"""Gaps of streams whose KV cache moves, in a whole system on this machine.

    python -m benchmarks.kv --only drain [--streams 20] [--tokens 2000] [--save]
    python -m benchmarks.kv --only roles --tokens 8000 --beside 16 --save

  drain   ``--streams`` streams with contexts of ``--tokens`` tokens run on one of two workers,
          which is then drained. The figure is each stream's longest gap, less the longest
          undisturbed gap, p50 and p99; with moved blocks and without (engine.transfer: false)
  roles   six prompts of ``--tokens`` tokens enter one after the other beside 8 streams, which make
          a quarter as many tokens, on a prefill and a decode worker, and on two workers of both
          roles: the streams' gaps p99, the prompts' TTFT p50

The model is a Llama of 100M parameters with random weights. The workers share the cores of one
machine, unlike those of a cluster. The goals: 60 and 150 ms; 0.4 and 1.2 times.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LLAMA_100M, write_llama
from benchmarks.support.command import PartResult
from benchmarks.support.figures import percentile
from benchmarks.support.machine_rates import cpu_name
from tests.support.system import System

_MODEL = "moved"
_NUM_PROMPTS = 6
_USUAL_TOKENS = 2_000
_MAX_TOKENS = 1_500
_UNDISTURBED_S, _AFTER_S = 4.0, 6.0
_TIMEOUT_S = 300.0


class DrainFigures(msgspec.Struct, kw_only=True):
    """Milliseconds of standstill beyond the longest gap that most streams have undisturbed."""

    undisturbed_p99_ms: float
    pause_p50_ms: float
    pause_p99_ms: float
    num_lost: int


class RoleFigures(msgspec.Struct, kw_only=True):
    """Milliseconds of the streams beside prompts, and of the prompts."""

    gap_p99_ms: float
    ttft_p50_ms: float
    tokens_per_s: float


class Results(msgspec.Struct, kw_only=True):
    """Figures of a part's systems by name; ``streams`` is the number of measured streams."""

    cpu: str
    streams: int
    tokens: int
    systems: dict[str, DrainFigures | RoleFigures]


class _Stream:
    """Stream of one answer, with the time of each part."""

    def __init__(self, seed: int, num_prompt_tokens: int, max_tokens: int) -> None:
        generator = random.Random(seed)
        prompt = [
            generator.randrange(FIRST_TEXT_TOKEN, LLAMA_100M.vocab_size)
            for _ in range(num_prompt_tokens)
        ]
        self._body = {
            "model": _MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._max_tokens = max_tokens
        self.sent_s = 0.0
        self.times_s: list[float] = []
        self.has_begun = asyncio.Event()
        self.is_whole = False

    async def run(self, http: httpx.AsyncClient) -> None:
        self.sent_s = time.perf_counter()
        async with http.stream("POST", "/v1/completions", json=self._body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if chunk.get("choices"):
                        self.times_s.append(time.perf_counter())
                        self.has_begun.set()
                    if usage := chunk.get("usage"):
                        self.is_whole = usage["completion_tokens"] == self._max_tokens

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return the gaps whose later part came between two moments."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [after - before for before, after in pairs if begin_s <= after <= end_s]


@contextmanager
def _system(model: Path, *arguments: str, transfer: bool = True) -> Iterator[System]:
    with tempfile.TemporaryDirectory() as folder:
        catalogue = Path(folder) / "models.yaml"
        catalogue.write_text(f"models:\n  {_MODEL}:\n    source: {model}\n")
        environment = {
            "MILLRACE_CATALOGUE": str(catalogue),
            # Workers that measure may choose different products, and then results have different
            # bits.
            "MILLRACE_WORKER__ENGINE__KERNELS": "native",
            "MILLRACE_WORKER__ENGINE__SPECULATION": "off",
        }
        if not transfer:
            environment["MILLRACE_WORKER__ENGINE__TRANSFER"] = "false"
        system = System(
            Path(folder) / "data",
            arguments=("--port", "0", "--model", _MODEL, *arguments),
            environment=environment,
        ).start()
        try:
            yield system
        finally:
            system.stop()


async def _command(system: System, *arguments: str) -> None:
    command = [sys.executable, "-m", "millrace", "workers", *arguments, "--data", str(system.data)]
    finished = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if finished.returncode:
        print(finished.stdout + finished.stderr, file=sys.stderr)


async def _drain(system: System, num_streams: int, num_tokens: int) -> DrainFigures:
    streams = [_Stream(seed, num_tokens, _MAX_TOKENS) for seed in range(num_streams)]
    async with httpx.AsyncClient(base_url=system.http, timeout=_TIMEOUT_S) as http:
        running = [asyncio.create_task(stream.run(http)) for stream in streams]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        await _command(system, "move", "worker-2", "--to", "worker-1")
        await asyncio.sleep(1.0)
        begin_s = time.perf_counter()
        await asyncio.sleep(_UNDISTURBED_S)
        drained_s = time.perf_counter()
        await _command(system, "drain", "worker-1", "--timeout", "0")
        await asyncio.sleep(_AFTER_S)
        end_s = time.perf_counter()
        await asyncio.gather(*running)
    usual = [gap for stream in streams for gap in stream.gaps_s(begin_s, drained_s)]
    usual_s = percentile(usual, 0.99)
    pauses = [max(stream.gaps_s(drained_s, end_s), default=0.0) for stream in streams]
    beyond_ms = [1e3 * max(0.0, pause - usual_s) for pause in pauses]
    return DrainFigures(
        undisturbed_p99_ms=1e3 * usual_s,
        pause_p50_ms=percentile(beyond_ms, 0.5),
        pause_p99_ms=percentile(beyond_ms, 0.99),
        num_lost=sum(not stream.is_whole for stream in streams),
    )


async def _beside_prompts(system: System, num_tokens: int, num_beside: int) -> RoleFigures:
    num_made = num_tokens // 4
    beside = [_Stream(seed, 32, num_made) for seed in range(1_000, 1_000 + num_beside)]
    prompts = [_Stream(seed, num_tokens, 16) for seed in range(2_000, 2_000 + _NUM_PROMPTS)]
    async with httpx.AsyncClient(base_url=system.http, timeout=_TIMEOUT_S) as http:
        begin_s = time.perf_counter()
        running = [asyncio.create_task(stream.run(http)) for stream in beside]
        await asyncio.gather(*(stream.has_begun.wait() for stream in beside))
        prompted_s = time.perf_counter()
        for prompt in prompts:
            await prompt.run(http)
        end_s = time.perf_counter()
        await asyncio.gather(*running)
        over_s = time.perf_counter()
    gaps = [gap for stream in beside for gap in stream.gaps_s(prompted_s, end_s)]
    num_out = num_made * len(beside) + (num_tokens + 16) * len(prompts)
    return RoleFigures(
        gap_p99_ms=1e3 * percentile(gaps, 0.99),
        ttft_p50_ms=1e3 * statistics.median(one.times_s[0] - one.sent_s for one in prompts),
        tokens_per_s=num_out / (over_s - begin_s),
    )


def drain(streams: int = 20, tokens: int = _USUAL_TOKENS) -> PartResult:
    """Drain with ``tokens`` in each context."""
    found: dict[str, DrainFigures | RoleFigures] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(Path(folder))
        for name, transfer in (("pulled", True), ("computed", False)):
            with _system(model, "--workers", "2", transfer=transfer) as system:
                found[name] = asyncio.run(_drain(system, streams, tokens))
            print(f"drain, {name}: {found[name]}", flush=True)
    return PartResult(Results(cpu=cpu_name(), streams=streams, tokens=tokens, systems=found))


def roles(tokens: int = _USUAL_TOKENS, beside: int = 8) -> PartResult:
    """Measure ``beside`` streams beside prompts of ``tokens`` tokens."""
    found: dict[str, DrainFigures | RoleFigures] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(Path(folder))
        for name, workers in (("apart", "prefill:1,decode:1"), ("mixed", "2")):
            with _system(model, "--workers", workers) as system:
                found[name] = asyncio.run(_beside_prompts(system, tokens, beside))
            print(f"roles, {name}: {found[name]}", flush=True)
    return PartResult(Results(cpu=cpu_name(), streams=beside, tokens=tokens, systems=found))
