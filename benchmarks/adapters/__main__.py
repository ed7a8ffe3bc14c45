"""LoRA adapters beside their base, on the engine and at the scheduler.

    python -m benchmarks.adapters [--only PART ...] [--save]

The model is a Llama of 100M parameters with random weights, in bfloat16:

  engine     tokens a second of twenty adapters of rank 16 in turns beside the base alone, at 1, 8
             and 32 streams of 128 tokens in and 64 out. The adapters change queries and values
             (PEFT's default), or every projection. Also the first token of adapters of 20 MB that
             only a local S3 server has, beside 8 streams that decode
  placement  share of requests whose worker has their adapter: 100 adapters by Zipf's law, 2 workers
             with 20 slots each, with and without the scheduler's adapter placement
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from benchmarks.adapters.engine import EngineFigures, measure
from benchmarks.adapters.placement import HitRates, hit_rates
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.processes import in_new_process

_Part = Literal["engine", "placement"]
_SKEWS = (0.6, 0.8, 1.0, 1.2)


class Result(msgspec.Struct, kw_only=True):
    """Result of a run."""

    cpu: str
    engine: EngineFigures | None = None
    placement: list[HitRates] = []


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


def run(only: Sequence[_Part] = get_args(_Part), runs: int = 3) -> PartResult:
    """Report the medians of ``runs`` rounds."""
    result = Result(cpu=cpu_name())
    if "engine" in only:
        with tempfile.TemporaryDirectory() as folder:
            result.engine = in_new_process(measure, Path(folder), runs)
    if "placement" in only:
        result.placement = [hit_rates(skew) for skew in _SKEWS]
    print("\n".join(_lines(result)))
    return PartResult(result)


if __name__ == "__main__":
    sys.exit(run_command("adapters", run, __doc__))
