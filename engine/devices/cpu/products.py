"""Choice between oneDNN and the compiled kernels for products on this CPU, by measurement."""

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

# Limits of the sample. Two layers of this width exceed a core's caches and are measured in under a
# tenth of a second. Wider layers spend their time in products, at the same rates.
_NUM_LAYERS = 2
_MOST_HIDDEN, _MOST_INTERMEDIATE = 1024, 4096
_MOST_EXPERTS = 8
# Batches: decodes of 1, 8 and 32 streams, and a prefill.
_NUM_STREAMS = (1, 8, 32)
_NUM_PROMPT_TOKENS = 128
_CONTEXT_TOKENS = 63
_BLOCK_TOKENS = 16
# Repeats of a batch, and the fewest once they have taken 0.2 s: disturbances weigh less in long
# steps.
_REPEATS, _FEWEST_REPEATS = 5, 2
_ENOUGH_S = 0.2
_VOCAB_SIZE = 16

Step = Callable[[FlatBatch], object]

_log = logging.getLogger(__name__)


def choose_product(
    kernels: CpuKernels, config: ModelConfig, clock: Callable[[], float] = time.perf_counter
) -> bool:
    """Return whether the compiled kernels should make the linear maps of a model.

    True if they have products of its dtype and their steps take less time than oneDNN's, as a mean
    over batch sizes. Whole steps are timed, because layers of the kernels' own products may be
    computed in one call (``compiled_decoder``), which can save more than the products differ by.
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
    """Return a config of two layers of a model, of limited width and without vocabulary."""
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
    """Return the mean over batches of the least time of ``own`` over that of ``other``.

    The two are measured in turns, so that other load on the machine disturbs both. The first turn
    is not counted.
    """
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
    """Weights of one constant: the time of a product does not depend on their values."""

    path = "(a sample)"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002 (all alike)
        return torch.full(shape, 0.01, dtype=torch.bfloat16)


def sample_decoder(
    kernels: CpuKernels, config: ModelConfig, product: MakeLinear
) -> Decoder[FlatBatch, CpuMetadata]:
    """Build a decoder like a model's own, with a KV cache for the largest of the batches."""
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
    """Build decodes of rising numbers of streams, then a prefill, for sample decoders."""
    decodes = [_batch([(_CONTEXT_TOKENS, 1)] * num_streams) for num_streams in _NUM_STREAMS]
    return [*decodes, _batch([(0, _NUM_PROMPT_TOKENS)])]


def _batch(lengths: list[tuple[int, int]]) -> FlatBatch:
    """Build a batch of sequences from pairs of tokens in the cache and new tokens."""
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
