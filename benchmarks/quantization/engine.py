"""Measurement of weights of one kind in the engine: speed, quality, logits.

Each function needs a new process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.peers.loads import DISTINCT_LOADS, distinct, measure
from benchmarks.support.closed_loop import answers, run_closed_loop
from benchmarks.support.figures import Figures
from millrace.engine.threads.choice import configure_threads
from millrace.registry.demo import MODEL_DIR
from millrace.schemas.config import EngineConfig
from tests.support.gguf_files import MatrixType

if TYPE_CHECKING:
    import torch

    from millrace.engine.devices.cpu.attention import TorchAttention
    from millrace.engine.kernels.operations import Linear
    from millrace.engine.models.decoder import Decoder, DecoderWeights
    from millrace.engine.models.weight_reader import MakeLinear
    from millrace.engine.quantization.linear import MakeQuantized
    from millrace.engine.step.batch import FlatBatch
    from millrace.registry.checkpoints.checkpoint import ModelConfig
    from tools.demo.answers import Answerer, Messages


WIDE: Final = "bfloat16"
# Our kinds, and llama.cpp's formats of as many bits.
PEER_FORMATS: Final[dict[str, MatrixType]] = {"int8": "q8_0", "int4": "q4_0"}
KINDS: Final = (WIDE, *PEER_FORMATS)


def settings(kind: str) -> EngineConfig:
    """Return the engine's config for weights rounded to ``kind`` at load."""
    return EngineConfig(
        dtype=WIDE,
        device="cpu",
        max_num_sequences=max(load.streams for load in DISTINCT_LOADS),
        quantization=None if kind == WIDE else kind,
        # Random weights repeat themselves, so accepted proposals would hide the steps' speed.
        speculation="off",
    )


class AloneFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by load; ``step_ms`` is one stream's median step, which reads ``weight_bytes``."""

    figures: dict[str, Figures]
    step_ms: float
    weight_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """Rate at which one stream's step reads the weights, other work included."""
        return self.weight_bytes / self.step_ms * 1e3


def measure_alone(kind: str, path: Path, runs: int = 3) -> AloneFigures:
    """Measure closed loops of 1, 8 and 32 streams."""
    configure_threads(EngineConfig(), shared=False)
    from millrace.engine.step.engine import Engine
    from millrace.registry.checkpoints.checkpoint import read_model_config

    config = read_model_config(path)
    engine = Engine.load(path, settings(kind))
    figures = {
        load.name: measure(
            lambda load, prompts: run_closed_loop(
                engine, prompts, [load.num_output_tokens] * len(prompts), load.streams
            ),
            load,
            runs,
            config.vocab_size,
        )
        for load in DISTINCT_LOADS
    }
    return AloneFigures(
        figures=figures,
        step_ms=figures[distinct(1, 4).name].itl_p50_ms,
        weight_bytes=engine.weight_bytes,
    )


_MAX_NEW_TOKENS = 160


class QualityFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Quality: how many of ``num_questions`` were answered exactly as in the FAQ."""

    num_questions: int
    num_right: int

    @property
    def points(self) -> float:
        """Right answers in per cent."""
        return 100.0 * self.num_right / self.num_questions


def measure_quality(kind: str) -> QualityFigures:
    """Ask the demo model every held-out phrasing."""
    configure_threads(EngineConfig(), shared=False)
    from tools.demo.evaluate import measure as measure_answers
    from tools.demo.faq import load_pairs

    report = measure_answers(_engine_answerer(kind, MODEL_DIR), load_pairs())
    return QualityFigures(
        num_questions=report.num_in_domain + report.num_out_of_domain,
        num_right=report.num_in_domain_right + report.num_out_of_domain_right,
    )


def _engine_answerer(kind: str, path: Path) -> Answerer:
    from millrace.engine.step.engine import Engine
    from millrace.engine.types import EngineRequest
    from millrace.registry.tokenizers.tokenizer import Tokenizer
    from millrace.schemas.jobs import ChatMessage
    from millrace.schemas.sampling import SamplingParams

    engine = Engine.load(path, settings(kind))
    tokenizer = Tokenizer.load(path)
    greedy = SamplingParams(max_tokens=_MAX_NEW_TOKENS, temperature=0.0)

    def answer(conversations: list[Messages], _guesses: list[str] | None = None, /) -> list[str]:
        requests = [
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=tuple(
                    tokenizer.encode_chat(
                        [ChatMessage(one["role"], one["content"]) for one in messages]
                    )
                ),
                sampling=greedy,
                eos_token_ids=tokenizer.eos_token_ids,
            )
            for index, messages in enumerate(conversations)
        ]
        return [tokenizer.decode(token_ids) for token_ids in answers(engine, requests).values()]

    return answer


_OUTPUTS, _INPUTS = 3072, 1536
_NUM_ROWS: Final = (1, 8, 32)
_TIMES = 8
# Instructions that are left out; none first.
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "all instructions": (),
    "without BF16 and VNNI": ("-mno-avx512bf16", "-mno-avx512vnni"),
    "without AVX-512": ("-mno-avx512f",),
}


def measure_products(build: str) -> dict[str, list[float]]:
    """Return by kind the microseconds of a product of 3,072 x 1,536 weights with 1, 8 and 32 rows.

    One thread computes; each time is the best of several in turns. ``build`` is of BUILDS.
    """
    import time

    import torch

    from millrace.engine.kernels.build import products_library
    from millrace.engine.kernels.cpu import CpuProducts
    from millrace.engine.models.linears import PackedProjection, packed_quantized
    from millrace.engine.quantization.rounding import rounded_int4_groups, rounded_int8_groups

    torch.set_num_threads(1)
    kernels = CpuProducts(products_library(*BUILDS[build]))
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=torch.Generator().manual_seed(0))
    linears: dict[str, Linear] = {
        WIDE: PackedProjection.of_wide(kernels, weight.bfloat16(), None),
        "int8": packed_quantized(kernels, rounded_int8_groups(weight), None),
        "int4": packed_quantized(kernels, rounded_int4_groups(weight), None),
    }
    best: dict[str, list[float]] = {kind: [] for kind in linears}
    for num_rows in _NUM_ROWS:
        rows = torch.randn(num_rows, _INPUTS).bfloat16()
        times_s = {kind: float("inf") for kind in linears}
        for _ in range(_TIMES):
            for kind, linear in linears.items():
                linear(rows)
                begun_s = time.perf_counter()
                linear(rows)
                times_s[kind] = min(times_s[kind], time.perf_counter() - begun_s)
        for kind, time_s in times_s.items():
            best[kind].append(time_s * 1e6)
    return best


_NUM_TOKENS = 64


class LogitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of logits.

    ``max_error`` is the largest difference over the largest magnitude of the exact logits;
    ``rms_error`` is the same for root mean squares.
    """

    max_error: float
    rms_error: float


def measure_logits(kind: str, path: Path) -> LogitFigures:
    """Compare the compiled kernels in bfloat16 with plain torch in float64."""
    configure_threads(EngineConfig(), shared=False)
    import torch

    from benchmarks.support.prompts import shared_prefix_prompts
    from millrace.engine.devices.cpu.fused_decoder import compiled_decoder
    from millrace.engine.devices.cpu.operations import TorchOperations
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.decoder import Decoder
    from millrace.engine.models.linears import PackedProjection, Projection, packed_quantized
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
    from millrace.engine.quantization.rounding import quantize_at_load

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
