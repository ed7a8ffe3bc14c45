"""Quantized weights beside llama.cpp's and beside bfloat16: speed, bandwidth, quality, logits.

    python -m benchmarks.quantization [--only PART ...] [--save]

Speeds are of a Llama of 100M parameters with random weights, under closed loops of 1, 8 and 32
streams, 128 tokens in and 64 out. Each system is measured alone; figures are medians of several
runs after a warm-up:

  served   ``millrace up --quantization int8`` and ``int4``, and llama.cpp's server (`make engines`)
           with the same weights in q8_0 and q4_0, over HTTP by one client; started in turns
  gguf     ``millrace up`` and llama.cpp's server on the same GGUF files, of ``llama-quantize``
  engine   the engine alone in bfloat16, int8 and int4: tokens a second, and the rate at which a
           step of one stream reads its weights, beside the machine's best read rate
  products one product on one thread, also without some of the CPU's instructions
  quality  exact answers of the demo model to held-out questions
  logits   the largest error of logits beside the same quantized weights in float64
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from benchmarks.checkpoints import LLAMA_100M, write_llama
from benchmarks.peers.loads import DISTINCT_LOADS
from benchmarks.peers.servers import measure_server, serving
from benchmarks.quality.llamacpp import quantize
from benchmarks.quantization.engine import (
    BUILDS,
    KINDS,
    PEER_FORMATS,
    WIDE,
    AloneFigures,
    LogitFigures,
    QualityFigures,
    measure_alone,
    measure_logits,
    measure_products,
    measure_quality,
)
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.figures import Figures, medians
from benchmarks.support.machine_rates import cpu_name, machine_rates
from benchmarks.support.processes import in_new_process
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.engines import EngineKind
from tests.support.gguf_files import write_gguf
from tests.support.system import System

_Part = Literal["served", "gguf", "engine", "products", "quality", "logits"]

_GGUF_TYPES = ("Q8_0", "Q4_1", "Q4_K_M")


class ServedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one load with weights of one kind: medians of both systems.

    ``peer_kind`` is llama.cpp's format.
    """

    load: str
    kind: str
    peer_kind: str
    own: Figures
    peer: Figures

    @property
    def ratio(self) -> float:
        """Our tokens a second divided by llama.cpp's."""
        return self.own.tokens_per_s / self.peer.tokens_per_s


class Result(msgspec.Struct, kw_only=True):
    """Result of a run; ``read_bytes_per_s`` is the best rate of memory reads by all threads."""

    cpu: str
    read_bytes_per_s: float
    served: list[ServedResult] = []
    engine: dict[str, AloneFigures] = {}
    products_us: dict[str, dict[str, list[float]]] = {}
    quality: dict[str, QualityFigures] = {}
    logits: dict[str, LogitFigures] = {}


def _served(
    kind: str, own: Sequence[str], gguf: Path, vocab_size: int, folder: Path, runs: int
) -> list[ServedResult]:
    """Measure ``millrace up`` with the arguments ``own`` beside llama.cpp with the file ``gguf``.

    In turns, so that a slow minute of the machine affects both, and never side by side: an idle
    system would still take cores from the other one's threads.
    """
    rounds: dict[str, tuple[list[Figures], list[Figures]]] = {
        load.name: ([], []) for load in DISTINCT_LOADS
    }
    for run in range(runs):
        system = System(folder / f"data-{gguf.stem}-{run}", ("--port", "0", *own)).start()
        try:
            for load in DISTINCT_LOADS:
                rounds[load.name][0].append(measure_server(system.http, load, 1, vocab_size))
        finally:
            system.stop()
        with serving(EngineKind.LLAMACPP, gguf, folder) as peer:
            for load in DISTINCT_LOADS:
                rounds[load.name][1].append(measure_server(peer, load, 1, vocab_size))
    return [
        ServedResult(
            load=name, kind=kind, peer_kind=gguf.stem, own=medians(own_figures), peer=medians(peer)
        )
        for name, (own_figures, peer) in rounds.items()
    ]


def _rounded_at_load(checkpoint: Path, folder: Path, runs: int) -> list[ServedResult]:
    """Measure the checkpoint rounded at load beside llama.cpp's format of as many bits."""
    vocab_size = read_model_config(checkpoint).vocab_size
    results: list[ServedResult] = []
    for kind, peer_kind in PEER_FORMATS.items():
        gguf = write_gguf(folder / f"{peer_kind}.gguf", checkpoint, peer_kind)
        own = ("--model", str(checkpoint), "--quantization", kind)
        results += _served(kind, own, gguf, vocab_size, folder, runs)
    return results


def _gguf(checkpoint: Path, folder: Path, runs: int) -> list[ServedResult]:
    """Measure both systems on the same files."""
    vocab_size = read_model_config(checkpoint).vocab_size
    wide = write_gguf(folder / "wide.gguf", checkpoint)
    results: list[ServedResult] = []
    for kind in _GGUF_TYPES:
        gguf = quantize(folder / f"{kind}.gguf", wide, kind)
        results += _served(kind, ("--model", str(gguf)), gguf, vocab_size, folder, runs)
    return results


def _measure(parts: Sequence[str], runs: int, folder: Path) -> Result:
    result = Result(cpu=cpu_name(), read_bytes_per_s=machine_rates().read_bytes_per_s)
    checkpoint = write_llama(folder / "llama-100m", LLAMA_100M._replace(context_window_tokens=1024))
    for part in parts:
        print(f"measuring {part}", file=sys.stderr, flush=True)
        if part in ("served", "gguf"):
            measure_both = _rounded_at_load if part == "served" else _gguf
            result.served += measure_both(checkpoint, folder, runs)
            continue
        if part == "products":
            for build in BUILDS:
                result.products_us[build] = in_new_process(measure_products, build)
            continue
        for kind in KINDS:
            if part == "engine":
                result.engine[kind] = in_new_process(measure_alone, kind, checkpoint)
            elif part == "quality":
                result.quality[kind] = in_new_process(measure_quality, kind)
            else:
                result.logits[kind] = in_new_process(measure_logits, kind, checkpoint)
    return result


def _lines(result: Result) -> list[str]:
    lines = [f"{result.cpu}; memory is read at {result.read_bytes_per_s / 1e9:.1f} GB/s"]
    lines += [
        f"  {one.kind} {one.load:26} {one.own.tokens_per_s:7.1f} tokens/s, llama.cpp "
        f"{one.peer_kind} {one.peer.tokens_per_s:7.1f}: {one.ratio:.2f}x; TTFT p50 "
        f"{one.own.ttft_p50_ms:.1f} and {one.peer.ttft_p50_ms:.1f} ms"
        for one in result.served
    ]
    wide = result.engine.get(WIDE)
    for kind, alone in result.engine.items():
        for load, figures in alone.figures.items():
            ratio = ""
            if wide is not None and kind != WIDE:
                times = figures.tokens_per_s / wide.figures[load].tokens_per_s
                ratio = f", {times:.2f}x of bfloat16"
            lines.append(f"  engine {kind:8} {load:26} {figures.tokens_per_s:7.1f} tokens/s{ratio}")
        share = alone.bytes_per_s / result.read_bytes_per_s
        lines.append(
            f"  engine {kind:8} one stream reads {alone.weight_bytes / 1e6:.0f} MB in "
            f"{alone.step_ms:.2f} ms: {alone.bytes_per_s / 1e9:.1f} GB/s, {share:.0%} of the best"
        )
    for build, times_us in result.products_us.items():
        for kind in PEER_FORMATS:
            both = zip(times_us[WIDE], times_us[kind], strict=True)
            ratios = " / ".join(f"{wide_us / own_us:.2f}" for wide_us, own_us in both)
            lines.append(f"  products {kind:8} {build:22} 1 / 8 / 32 rows: {ratios}x of bfloat16")
    lines += [
        f"  quality {kind:8} {figures.num_right} of {figures.num_questions} exact: "
        f"{figures.points:.2f} %"
        for kind, figures in result.quality.items()
    ]
    lines += [
        f"  logits {kind:8} largest error {figures.max_error:.2e} of the largest logit, "
        f"RMS error {figures.rms_error:.2e}"
        for kind, figures in result.logits.items()
    ]
    return lines


def run(only: Sequence[_Part] = get_args(_Part), runs: int = 3) -> PartResult:
    """Report the medians of ``runs`` rounds."""
    with tempfile.TemporaryDirectory() as folder:
        result = _measure(only, runs, Path(folder))
    print("\n".join(_lines(result)))
    return PartResult(result)


if __name__ == "__main__":
    sys.exit(run_command("quantization", run, __doc__))
