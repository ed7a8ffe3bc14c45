"""Who multiplies on this CPU: oneDNN or the compiled kernels, by a measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import compiled_decoder
from millrace.engine.devices.cpu.operations import CpuMetadata
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder
from millrace.engine.models.linears import PackedProjection, Projection
from millrace.engine.models.loader import load_weights
from millrace.engine.models.weight_reader import MakeLinear
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import ModelConfig

# A model's own layers up to this width, of which a pair is more than a core's caches hold and less
# than is measured in a tenth of a second. Wider ones take their time for the products alone, whose
# rates are those of this width.
_NUM_LAYERS = 2
_MOST_HIDDEN, _MOST_INTERMEDIATE = 1024, 4096
_MOST_EXPERTS = 8
# A decode of one and of several streams, and a prefill.
_NUM_STREAMS = (1, 8, 32)
_NUM_PROMPT_TOKENS = 128
_CONTEXT_TOKENS = 63
_BLOCK_TOKENS = 16
# Where a step takes longer, fewer repeats: what disturbs it is a smaller part of it.
_REPEATS, _FEWEST_REPEATS = 5, 2
_ENOUGH_S = 0.2
_VOCAB_SIZE = 16

Step = Callable[[FlatBatch], object]

_log = logging.getLogger(__name__)


def choose_product(
    kernels: CpuKernels, config: ModelConfig, clock: Callable[[], float] = time.perf_counter
) -> bool:
    """Whether the compiled kernels make the linear maps of a model: they have products of its
    dtype, and steps take less time with these than with oneDNN's, as a mean over sizes of batches.

    Steps are timed, not products: layers of the kernels' own products are computed in one call
    where that can be (``compiled_decoder``), which may be worth more than the products differ by.
    """
    if not kernels.has_products:
        return False
    packed: MakeLinear = partial(PackedProjection.of_wide, kernels)
    sample = sample_config(config)
    with torch.inference_mode():
        own, other = (sample_decoder(kernels, sample, product) for product in (packed, Projection))
        ratio = time_ratio(own.forward, other.forward, sample_batches(), clock)
    _log.info("the compiled kernels compute in %.2f of the time that oneDNN takes", ratio)
    return ratio < 1.0


def sample_config(config: ModelConfig) -> ModelConfig:
    """Two layers as a model has them, narrower where it is wide, and none of its vocabulary."""
    group = config.num_attention_heads // config.num_key_value_heads
    most_key_heads = max(1, _MOST_HIDDEN // config.head_dim // group)
    num_key_heads = min(config.num_key_value_heads, most_key_heads)
    experts = config.experts
    if experts is not None:
        num_experts = min(experts.num_experts, _MOST_EXPERTS)
        experts = msgspec.structs.replace(
            experts,
            layers=tuple(range(_NUM_LAYERS)),
            num_experts=num_experts,
            num_chosen=min(experts.num_chosen, num_experts),
            intermediate_size=min(experts.intermediate_size, _MOST_INTERMEDIATE),
        )
    return msgspec.structs.replace(
        config,
        num_hidden_layers=_NUM_LAYERS,
        hidden_size=min(config.hidden_size, _MOST_HIDDEN),
        intermediate_size=min(config.intermediate_size, _MOST_INTERMEDIATE),
        num_attention_heads=num_key_heads * group,
        num_key_value_heads=num_key_heads,
        vocab_size=_VOCAB_SIZE,
        tie_word_embeddings=True,
        sliding_window=None,
        sliding_layers=(),
        experts=experts,
    )


def time_ratio(
    own: Step, other: Step, batches: list[FlatBatch], clock: Callable[[], float]
) -> float:
    """The mean over batches of the least time of one over that of the other, measured in turns:
    whatever else runs on the machine disturbs both. What a first time costs does not count."""
    total = 0.0
    for batch in batches:
        least_s = [float("inf"), float("inf")]
        counted_s = 0.0
        for turn in range(1 + _REPEATS):
            if turn > _FEWEST_REPEATS and counted_s > _ENOUGH_S:
                break
            for index, step in enumerate((own, other)):
                begin_s = clock()
                step(batch)
                if turn > 0:
                    took_s = clock() - begin_s
                    least_s[index] = min(least_s[index], took_s)
                    counted_s += took_s
        total += least_s[0] / least_s[1]
    return total / len(batches)


class _FilledTensors:
    """Weights that are all alike: how long a product takes does not depend on them."""

    path = "(a sample)"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002 (all alike)
        return torch.full(shape, 0.01, dtype=torch.bfloat16)


def sample_decoder(
    kernels: CpuKernels, config: ModelConfig, product: MakeLinear
) -> Decoder[FlatBatch, CpuMetadata]:
    """As a model's own is made, with a KV cache for the largest of the batches."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    weights = load_weights(
        Path(), config, dtype=dtype, device=device, source=_FilledTensors(), product=product
    )
    cache = KVCache(
        config,
        num_blocks=max(_NUM_STREAMS) * _blocks_of(_CONTEXT_TOKENS + 1),
        block_size_tokens=_BLOCK_TOKENS,
        dtype=dtype,
        device=device,
    )
    attention = TorchAttention(
        cache, num_heads=config.num_attention_heads, dtype=dtype, windows=config.windows
    )
    return compiled_decoder(config, weights, attention, kernels)


def sample_batches() -> list[FlatBatch]:
    """Decodes of rising numbers of streams, then a prefill; for decoders of samples."""
    decodes = [_batch([(_CONTEXT_TOKENS, 1)] * num_streams) for num_streams in _NUM_STREAMS]
    return [*decodes, _batch([(0, _NUM_PROMPT_TOKENS)])]


def _batch(lengths: list[tuple[int, int]]) -> FlatBatch:
    """Of sequences with so many tokens in the cache and new ones."""
    ranges: list[QueryRange] = []
    positions: list[int] = []
    num_blocks = 0
    for num_context_tokens, num_tokens in lengths:
        num_own = _blocks_of(num_context_tokens + num_tokens)
        table = list(range(num_blocks, num_blocks + num_own))
        ranges.append(QueryRange(len(positions), num_tokens, num_context_tokens, table))
        positions += range(num_context_tokens, num_context_tokens + num_tokens)
        num_blocks += num_own
    return FlatBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        ranges=ranges,
        num_single=sum(num_tokens == 1 for _, num_tokens in lengths),
        sampled_rows=torch.empty(0, dtype=torch.int64),
        sampled=[],
        pooled=[],
        scored=[],
    )


def _blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_TOKENS)
