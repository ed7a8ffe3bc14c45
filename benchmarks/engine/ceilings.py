"""Ceilings of this machine: the rates that bound an engine on its CPU.

    python -m benchmarks.engine --only ceilings [--model PATH] [--threads N]

Reads from memory, multiplies matrices, and runs only the linear maps of a decode step, by the
engine's own code. The default model is the 100M Llama of the comparisons.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.support.command import PartResult
from benchmarks.support.machine_rates import machine_rates
from benchmarks.support.model import measured_model
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.models.decoder import DecoderWeights

BATCHES = (1, 8, 16, 32)
# The smaller size is for CPUs without bfloat16 products, which take minutes for the larger.
_GEMM_SIZES, _LONGEST_GEMM_S = (512, 4096), 2.0
_REPEATS = 7
_DECODE_REPEATS = 15


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of ``num_threads`` threads.

    ``weight_bytes`` are read in each decode step, which bounds batch 1 to ``batch_1_tokens_per_s``
    unless caches hold part of them. ``instruction_flops`` is the rate of the vector units' dot
    products of bfloat16 pairs without memory reads, or 0 without such instructions. ``gemm_flops``
    is the rate of torch's product of two matrices. ``gemm_only_ms`` is the time of a decode step's
    linear maps alone, by batch.
    """

    num_threads: int
    read_bytes_per_s: float
    gemm_flops: float
    instruction_flops: float
    weight_bytes: int
    batch_1_tokens_per_s: float
    gemm_only_ms: dict[int, float]


def measured(path: Path, threads: int = 0) -> Ceilings:
    """Measure in a process that has not imported torch; 0 ``threads`` means all cores."""
    configure_threads(EngineConfig(num_threads=threads), shared=False)
    return measure(path)


def measure(path: Path, batches: tuple[int, ...] = BATCHES) -> Ceilings:
    """Measure the ceilings of checkpoint ``path`` in bfloat16, with torch's current threads."""
    import torch

    from benchmarks.gpu.loads import weight_bytes_per_step
    from millrace.engine.devices.cpu.loading import Arithmetic
    from millrace.engine.devices.cpu.products import choose_product
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.loader import load_weights
    from millrace.registry.checkpoints.checkpoint import read_model_config

    device = torch.device("cpu")
    config = read_model_config(path)
    dtype = torch.bfloat16
    kernels = CpuKernels(cpu_library(), dtype)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=device,
        product=Arithmetic(dtype, kernels, choose_product(kernels, config)).makers.product,
    )
    columns = config.num_attention_heads * config.head_dim
    rates = machine_rates()
    weight_bytes = weight_bytes_per_step(config)
    with torch.inference_mode():
        gemm_only_ms = {
            batch: _gemm_only_ms(weights, columns, config.intermediate_size, batch)
            for batch in batches
        }
    return Ceilings(
        num_threads=torch.get_num_threads(),
        read_bytes_per_s=rates.read_bytes_per_s,
        gemm_flops=_gemm_rate(),
        instruction_flops=rates.product_flops,
        weight_bytes=weight_bytes,
        batch_1_tokens_per_s=rates.read_bytes_per_s / weight_bytes,
        gemm_only_ms=gemm_only_ms,
    )


def lines(ceilings: Ceilings) -> list[str]:
    """Format the ceilings as lines to print."""
    gemms = ", ".join(f"{batch}: {ms:.2f} ms" for batch, ms in ceilings.gemm_only_ms.items())
    megabytes, bound = ceilings.weight_bytes / 1e6, ceilings.batch_1_tokens_per_s
    read, flops = ceilings.read_bytes_per_s / 1e9, ceilings.gemm_flops / 1e12
    allowed = ceilings.instruction_flops / 1e12
    most = f" of {allowed:.2f} that its vector instructions allow" if allowed else ""
    return [
        f"machine: {ceilings.num_threads} threads",
        f"  memory is read at {read:.1f} GB/s; bfloat16 is multiplied at {flops:.3g} TFLOP/s"
        + most,
        f"  {megabytes:.0f} MB of weights, read once a step, bound batch 1 to {bound:.0f} tokens/s",
        f"  the linear maps of a decode step alone, by batch: {gemms}",
    ]


def _gemm_rate() -> float:
    import torch

    rate = 0.0
    for size in _GEMM_SIZES:
        flop = 2 * size**3
        if flop > rate * _LONGEST_GEMM_S > 0:
            break
        left = torch.randn(size, size).bfloat16()
        right = torch.randn(size, size).bfloat16()
        rate = flop / _least_s(partial(torch.matmul, left, right))
    return rate


def _gemm_only_ms(
    weights: DecoderWeights, num_query_columns: int, intermediate_size: int, batch: int
) -> float:
    """Return the median time of a decode step's linear maps for ``batch`` rows, in order."""
    import torch

    from millrace.engine.models.mlp import GatedMLP

    head = weights.head
    assert head is not None
    hidden = torch.randn(batch, weights.embedding.shape[1]).to(weights.dtype)
    attended = torch.randn(batch, num_query_columns).to(weights.dtype)
    gated = torch.randn(batch, intermediate_size).to(weights.dtype)

    def step() -> None:
        for layer in weights.layers:
            assert isinstance(layer.mlp, GatedMLP)
            layer.qkv(hidden)
            layer.output.plus(hidden.clone(), attended)
            layer.mlp.gate_up(hidden)
            layer.mlp.down.plus(hidden.clone(), gated)
        head(hidden)

    step()
    return statistics.median(timeit.repeat(step, number=1, repeat=_DECODE_REPEATS)) * 1e3


def _least_s(work: Callable[[], object]) -> float:
    work()
    return min(timeit.repeat(work, number=1, repeat=_REPEATS))


def run(model: Path | None = None, threads: int = 0) -> PartResult:
    with measured_model(model, threads) as path:
        ceilings = measure(path)
    print("\n".join(lines(ceilings)))
    return PartResult(ceilings)
