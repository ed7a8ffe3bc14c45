"""Another engine's server behind the bus and alone, with one client, in one run.

    python -m benchmarks.engines --engine vllm|llamacpp [--model PATH] [--save]

The server is started once, with a worker's arguments, and measured in turns: directly over HTTP,
and through ``millrace up --engine KIND --engine-url``. Then ``millrace up`` starts a server itself,
which is killed with -9 under 20 streams. A gap is the time from the next server's readiness to a
stream's next token.

The model is a Llama of 100M parameters with random weights: a folder for vLLM, a GGUF file in bf16
for llama.cpp.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.peers.loads import DISTINCT_LOADS
from benchmarks.peers.servers import MAX_NUM_SEQUENCES, measure_server, serving
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.figures import Figures, medians
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.prompts import Prompt, distinct_prompts
from benchmarks.support.sse_load import COMPLETIONS, run_load
from millrace.registry.catalogue import Catalogue
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.engines import EngineKind
from tests.support.engine_servers import server_process
from tests.support.gguf_files import write_gguf
from tests.support.servers import free_port
from tests.support.system import System

_NUM_STREAMS = 20
_NUM_PROMPT_TOKENS = 32
_NUM_TOKENS = 400
_NUM_FIRST_TOKENS = 8
_VOCAB_SIZE = 8_000
_RUNS_FOR_S = 3.0
_STARTS_WITHIN_S = 400.0
_READY = "a new engine runs"
_PROGRAMS = {EngineKind.VLLM: "vllm", EngineKind.LLAMACPP: "llama-server"}


class KilledFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a killed server.

    ``ready_after_s`` is the time from the kill to the next engine. ``gaps_s`` is the time from
    there to each stream's next token, shortest first. ``alone_s`` is the time that a new server
    alone takes to the first tokens of prompts as long as prompt and output were then.
    ``num_tokens`` counts all tokens received, of those expected.
    """

    ready_after_s: float
    gaps_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    num_tokens: int
    num_due_tokens: int


def measure_kill(kind: EngineKind, model: Path, folder: Path) -> KilledFigures:
    """Kill the server of ``millrace up --engine KIND`` while 20 streams run.

    Raises RuntimeError if a stream does not complete.
    """
    arguments = ("--port", str(free_port()), "--model", str(model), "--engine", kind.value)
    system = System(
        folder,
        arguments,
        starts_within_s=_STARTS_WITHIN_S,
        environment={"MILLRACE_WORKER__ENGINE__MAX_NUM_SEQUENCES": str(MAX_NUM_SEQUENCES)},
    ).start()
    name = Catalogue({}).entry_for(str(model)).name
    try:
        ready_after_s, gaps_s, lengths, num_tokens = asyncio.run(
            _killed(system, _PROGRAMS[kind], name)
        )
    finally:
        system.stop()
    with serving(kind.value, model, folder) as url:
        alone_s = asyncio.run(_first_tokens_s(url, name, lengths))
    return KilledFigures(
        ready_after_s=ready_after_s,
        gaps_s=tuple(sorted(gaps_s)),
        alone_s=tuple(sorted(alone_s)),
        num_tokens=num_tokens,
        num_due_tokens=_NUM_STREAMS * _NUM_TOKENS,
    )


async def _killed(
    system: System, program: str, model: str
) -> tuple[float, list[float], list[int], int]:
    """Return the seconds from the kill to the next engine, and from there to each next token.

    Also returns each stream's length at that time, in tokens, and the number of all tokens.
    """
    prompts = distinct_prompts(_NUM_STREAMS, _NUM_PROMPT_TOKENS, _VOCAB_SIZE, seed=1)
    bodies = [_body(model, prompt, _NUM_TOKENS) for prompt in prompts]
    offset_s = time.time() - time.perf_counter()
    running = asyncio.create_task(run_load(system.http, bodies, _NUM_STREAMS, COMPLETIONS))
    await asyncio.sleep(_RUNS_FOR_S)
    killed_s = time.time()
    server_process(system, program).kill()
    result = await running
    ready_s = _ready_at(system)
    next_s, lengths = [], []
    for request in result.requests:
        num_before = sum(at_s + offset_s <= ready_s for at_s in request.parts_s)
        next_s.append(request.parts_s[num_before] + offset_s - ready_s)
        lengths.append(_NUM_PROMPT_TOKENS + num_before)
    num_tokens = sum(request.num_tokens for request in result.requests)
    return ready_s - killed_s, next_s, lengths, num_tokens


async def _first_tokens_s(url: str, model: str, lengths: list[int]) -> list[float]:
    """Return the seconds to the first token of each prompt, all sent at once."""
    prompts = [
        distinct_prompts(1, length, _VOCAB_SIZE, seed=2 + number)[0]
        for number, length in enumerate(lengths)
    ]
    bodies = [_body(model, prompt, _NUM_FIRST_TOKENS) for prompt in prompts]
    sent_s = time.perf_counter()
    result = await run_load(url, bodies, len(bodies), COMPLETIONS)
    return [request.parts_s[0] - sent_s for request in result.requests]


def _body(model: str, prompt: Prompt, num_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _ready_at(system: System) -> float:
    """Return the UTC epoch at which the next engine was ready, by the worker's log."""
    for log in sorted((system.data / "logs").glob("worker-1*")):
        for line in log.read_text().splitlines():
            if _READY in line:
                said = json.loads(line)["time"]
                return datetime.datetime.fromisoformat(said).timestamp()
    raise RuntimeError("the worker did not start another engine")


# Context window for which every slot of llama.cpp has memory.
_SHAPE = LlamaShape(context_window_tokens=1_024)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one load both ways: medians over the rounds, and the ratio of tokens a second."""

    load: str
    direct: Figures
    behind_the_bus: Figures

    @property
    def share(self) -> float:
        """Tokens a second behind the bus divided by those of the server alone."""
        return self.behind_the_bus.tokens_per_s / self.direct.tokens_per_s


class Result(msgspec.Struct, kw_only=True):
    """Result of a run."""

    engine: EngineKind
    cpu: str
    loads: list[LoadResult] = []
    killed: KilledFigures | None = None


def _measure_both(engine: EngineKind, runs: int, model: Path, vocab_size: int) -> list[LoadResult]:
    """Measure in turns, so that a slow minute of the machine affects both."""
    rounds: dict[str, tuple[list[Figures], list[Figures]]] = {
        load.name: ([], []) for load in DISTINCT_LOADS
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = stack.enter_context(serving(engine, model, Path(folder)))
        system = System(
            Path(folder) / "data",
            (
                *("--port", str(free_port()), "--model", str(model)),
                *("--engine", engine, "--engine-url", url),
            ),
        ).start()
        stack.callback(system.stop)
        # One server answers all runs, so prompts must not repeat: they would be in its cache.
        first_runs = count(step=2)
        for _ in range(runs):
            for load in DISTINCT_LOADS:
                direct, behind = rounds[load.name]
                direct.append(measure_server(url, load, 1, vocab_size, next(first_runs)))
                behind.append(measure_server(system.http, load, 1, vocab_size, next(first_runs)))
    return [
        LoadResult(load=name, direct=medians(direct), behind_the_bus=medians(behind))
        for name, (direct, behind) in rounds.items()
    ]


def _print(result: Result) -> None:
    print(f"{result.engine} on {result.cpu}")
    for one in result.loads:
        direct, behind = one.direct, one.behind_the_bus
        print(
            f"  {one.load:32} {direct.tokens_per_s:7.1f} tokens/s alone, "
            f"{behind.tokens_per_s:7.1f} behind the bus: {one.share:.3f}; TTFT p50 "
            f"{direct.ttft_p50_ms:.1f} and {behind.ttft_p50_ms:.1f}, p99 "
            f"{direct.ttft_p99_ms:.1f} and {behind.ttft_p99_ms:.1f} ms"
        )
    if result.killed is not None:
        gaps_s, alone_s = result.killed.gaps_s, result.killed.alone_s
        print(
            f"  killed under {len(gaps_s)} streams: the next was ready after "
            f"{result.killed.ready_after_s:.1f} s, and the streams' next tokens came "
            f"{gaps_s[len(gaps_s) // 2]:.2f} (p50) and {gaps_s[-1]:.2f} s (longest) behind that; "
            f"the server alone takes {alone_s[len(alone_s) // 2]:.2f} and {alone_s[-1]:.2f} s to "
            f"the first tokens of prompts of these lengths"
        )


def run(
    engine: Literal["vllm", "llamacpp"],
    model: Path | None = None,
    runs: int = 3,
    only: Literal["loads", "kill"] | None = None,
) -> PartResult:
    """Measure ``model``, or a new checkpoint; report the medians of ``runs``."""
    result = Result(engine=EngineKind(engine), cpu=cpu_name())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_llama(Path(folder) / "llama-100m", _SHAPE)
        path = model or checkpoint
        if result.engine is EngineKind.LLAMACPP and model is None:
            path = write_gguf(Path(folder) / "llama-100m.gguf", checkpoint)
        if only != "kill":
            vocab_size = read_model_config(checkpoint).vocab_size
            result.loads = _measure_both(result.engine, runs, path, vocab_size)
        if only != "loads":
            result.killed = measure_kill(result.engine, path, Path(folder) / "killed")
    _print(result)
    return PartResult(result, file=f"engines/{result.engine}.json")


if __name__ == "__main__":
    sys.exit(run_command("engines", run, __doc__))
