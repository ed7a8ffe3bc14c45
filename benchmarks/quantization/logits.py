"""How far logits are from those of the same quantized weights in float64.

    python -m benchmarks.quantization.logits KIND --model PATH

Prints one JSON object, for all positions of a prompt of random tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.quantization.kinds import KINDS, WIDE
from benchmarks.support.command import command_parser
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from millrace.engine.devices.cpu.attention import TorchAttention
    from millrace.engine.models.decoder import Decoder, DecoderWeights
    from millrace.engine.models.weight_reader import MakeLinear
    from millrace.engine.quantization.linear import MakeQuantized
    from millrace.engine.step.batch import FlatBatch
    from millrace.registry.checkpoints.checkpoint import ModelConfig

_NUM_TOKENS = 64


class LogitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``max_error``: the largest difference over the largest magnitude of the exact logits;
    ``rms_error``: that of the root mean squares."""

    max_error: float
    rms_error: float


def measure_logits(kind: str, path: Path) -> LogitFigures:
    """By the compiled kernels in bfloat16, beside plain torch in float64."""
    import torch

    from benchmarks.support.prompts import shared_prefix_prompts
    from millrace.engine.devices.cpu.fused_decoder import compiled_decoder
    from millrace.engine.devices.cpu.operations import TorchOperations
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.decoder import Decoder
    from millrace.engine.models.packed_projection import PackedProjection, packed_quantized
    from millrace.engine.models.projection import Projection
    from millrace.engine.quantization.linear import DequantizedLinear
    from millrace.registry.checkpoints.checkpoint import read_model_config

    config = read_model_config(path)
    (prompt,) = shared_prefix_prompts(1, 0, _NUM_TOKENS, config.vocab_size, seed=7)
    kernels = CpuKernels(cpu_library(), torch.bfloat16)
    with torch.inference_mode():
        weights, attention = _loaded(
            *(path, config, kind, torch.bfloat16),
            partial(PackedProjection.of_wide, kernels),
            partial(packed_quantized, kernels),
        )
        own = _logits(compiled_decoder(config, weights, attention, kernels), prompt).double()
        weights, attention = _loaded(
            *(path, config, kind, torch.float64),
            Projection,
            partial(DequantizedLinear, dtype=torch.float64),
        )
        operations = TorchOperations(attention, epsilon=config.rms_norm_eps)
        exact = _logits(Decoder(config, weights, operations), prompt)
        errors = own - exact
    return LogitFigures(
        max_error=float(errors.abs().max() / exact.abs().max()),
        rms_error=float(errors.square().mean().sqrt() / exact.square().mean().sqrt()),
    )


def _loaded(
    path: Path,
    config: ModelConfig,
    kind: str,
    dtype: torch.dtype,
    product: MakeLinear,
    quantized: MakeQuantized,
) -> tuple[DecoderWeights, TorchAttention]:
    import torch

    from millrace.engine.devices.cpu.attention import TorchAttention
    from millrace.engine.kv.cache import KVCache
    from millrace.engine.models.loader import load_weights
    from millrace.engine.quantization.at_load import quantize_at_load

    device = torch.device("cpu")
    at_load = quantize_at_load(None if kind == WIDE else kind)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=device,
        product=product,
        quantized=quantized,
        quantize=at_load.layers,
        quantize_head=at_load.head,
    )
    cache = KVCache(config, num_blocks=1, block_size_tokens=_NUM_TOKENS, dtype=dtype, device=device)
    attention = TorchAttention(
        cache, num_heads=config.num_attention_heads, dtype=dtype, windows=config.windows
    )
    return weights, attention


def _logits(decoder: Decoder[FlatBatch, Any], prompt: tuple[int, ...]) -> torch.Tensor:
    import torch

    from millrace.engine.step.batch import FlatBatch, QueryRange

    batch = FlatBatch(
        token_ids=torch.tensor(prompt),
        positions=torch.arange(len(prompt)),
        ranges=[QueryRange(0, len(prompt), 0, [0])],
        num_single=0,
        sampled_rows=torch.empty(0, dtype=torch.int64),
        sampled=[],
        pooled=[],
        scored=[],
    )
    return decoder.logits(decoder.forward(batch))


def main() -> None:
    parser = command_parser("quantization.logits", __doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    configure_threads(EngineConfig(), shared=False)
    measured = measure_logits(arguments.kind, arguments.model)
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main()
