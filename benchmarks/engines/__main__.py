"""An engine's server behind the bus beside itself, with one client, in one run.

    python -m benchmarks.engines --engine vllm|llamacpp [--model PATH] [--save]

The server is started once, with the arguments that a worker gives it, and measured in turns: asked
directly over HTTP, and through ``millrace up --engine KIND --engine-url``. Then ``millrace up``
starts one of its own, which is killed with -9 under 20 streams: the time from the moment that the
next one is ready to each stream's next token is the gap.

The model is a Llama of 100M parameters with random weights: a folder for vLLM, a GGUF file in bf16
for llama.cpp.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.engines.killed import KilledFigures, measure_kill
from benchmarks.engines.servers import serving
from benchmarks.peers.loads import LOADS
from benchmarks.peers.servers import measure_server
from benchmarks.support.command import Told, run_command
from benchmarks.support.figures import Figures, medians
from benchmarks.support.gguf_files import write_gguf
from benchmarks.support.machine_rates import cpu_name
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.engines import EngineKind
from tests.support.servers import free_port
from tests.support.system import System

# A window that every slot of llama.cpp has the memory for.
_SHAPE = LlamaShape(context_window_tokens=1_024)
_LOADS = tuple(load for load in LOADS if not load.num_shared_tokens)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load, both ways: medians over the rounds, and the ratio of tokens a second."""

    load: str
    direct: Figures
    behind_the_bus: Figures

    @property
    def share(self) -> float:
        """Tokens a second behind the bus over those of the server alone."""
        return self.behind_the_bus.tokens_per_s / self.direct.tokens_per_s


class Result(msgspec.Struct, kw_only=True):
    """What a run measured."""

    engine: EngineKind
    cpu: str
    loads: list[LoadResult] = []
    killed: KilledFigures | None = None


def _measure_both(engine: EngineKind, runs: int, model: Path, vocab_size: int) -> list[LoadResult]:
    """In turns, so that a slow minute of the machine is in both."""
    rounds: dict[str, tuple[list[Figures], list[Figures]]] = {
        load.name: ([], []) for load in _LOADS
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
        # One server answers them all: what it has in its cache must not be asked for again.
        first_runs = count(step=2)
        for _ in range(runs):
            for load in _LOADS:
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
) -> Told:
    """``model`` replaces one that is made for the run; the medians of the ``runs`` count."""
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
    return Told(result, file=f"engines/{result.engine}.json")


if __name__ == "__main__":
    sys.exit(run_command("engines", run, __doc__))
