"""LoRA adapters beside their base, on the engine and at the scheduler.

    python -m benchmarks.adapters [--only PART ...] [--save]

The model is a Llama of 100M parameters with random weights, in bfloat16:

  engine     tokens a second of twenty adapters of rank 16 in turns beside the base alone, by what
             the adapters change (queries and values, as PEFT does where it is not told, or every
             projection), at 1, 8 and 32 streams of 128 tokens in and 64 out; and the first token of
             adapters of 20 MB that are in a local S3 server only, beside 8 streams that decode
  placement  how many requests find their adapter where they are sent: 100 adapters by Zipf's law,
             2 workers with 20 slots each, with the scheduler's view of adapters and without
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.adapters.engine import EngineFigures
from benchmarks.adapters.placement import HitRates, hit_rates
from benchmarks.checkpoints import LLAMA_100M, write_llama
from benchmarks.support.command import command_parser, write_json
from benchmarks.support.machine_rates import cpu_name

_RESULT = Path(__file__).parents[1] / "results" / "adapters.json"
_PARTS = ("engine", "placement")
_SKEWS = (0.6, 0.8, 1.0, 1.2)


class Result(msgspec.Struct, kw_only=True):
    """What a run measured."""

    cpu: str
    engine: EngineFigures | None = None
    placement: list[HitRates] = []


def _measure_engine(runs: int) -> EngineFigures:
    """In a process of its own, which has all threads."""
    with tempfile.TemporaryDirectory() as folder:
        shape = LLAMA_100M._replace(context_window_tokens=1024)
        model = write_llama(Path(folder) / "llama-100m", shape)
        command = [sys.executable, "-m", "benchmarks.adapters.engine", "--model", str(model)]
        finished = subprocess.run(
            [*command, "--runs", str(runs)], check=True, stdout=subprocess.PIPE
        )
    return msgspec.json.decode(finished.stdout, type=EngineFigures)


def _lines(result: Result) -> list[str]:
    lines = [result.cpu]
    if result.engine is not None:
        for load, kinds in result.engine.figures.items():
            base = kinds["base"].tokens_per_s
            for kind, figures in kinds.items():
                size = result.engine.adapter_bytes.get(kind, 0) / 1e6
                what = (
                    "the base alone" if not size else f"20 adapters of {kind}, {size:.1f} MB each"
                )
                lines.append(
                    f"  {load:26} {what:34} {figures.tokens_per_s:7.1f} tokens/s, "
                    f"{figures.tokens_per_s / base:.3f} of the base"
                )
        cold = result.engine.cold
        lines.append(
            f"  first token, adapter of {cold.size_bytes / 1e6:.1f} MB: loaded "
            f"{cold.ttft_warm_p50_ms:.0f} ms, not loaded p50 {cold.ttft_cold_p50_ms:.0f} and p99 "
            f"{cold.ttft_cold_p99_ms:.0f} ms; others' time between tokens p99 "
            f"{cold.itl_p99_ms:.1f} and {cold.itl_p99_beside_ms:.1f} ms: "
            f"{cold.itl_p99_beside_ms / cold.itl_p99_ms:.2f}x"
        )
    lines += [
        f"  Zipf {one.skew}: {one.affine:.1%} find their adapter, without affinity "
        f"{one.least_loaded:.1%}: {one.affine / one.least_loaded:.2f}x; loads "
        f"{(1 - one.affine) / (1 - one.least_loaded):.2f}x"
        for one in result.placement
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything was measured."""
    parser = command_parser("adapters", __doc__)
    parser.add_argument("--only", nargs="+", choices=_PARTS, help="only these parts")
    parser.add_argument("--runs", type=int, default=3, help="rounds; the medians count")
    parser.add_argument("--save", action="store_true", help=f"write results/{_RESULT.name}")
    parsed = parser.parse_args(arguments)
    result = Result(cpu=cpu_name())
    parts = parsed.only or _PARTS
    if "engine" in parts:
        result.engine = _measure_engine(parsed.runs)
    if "placement" in parts:
        result.placement = [hit_rates(skew) for skew in _SKEWS]
    print("\n".join(_lines(result)))
    write_json(_RESULT if parsed.save else None, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
