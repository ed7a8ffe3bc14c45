"""Checks of a model's split over ranks and stages, and each rank's part of its blocks."""

from __future__ import annotations

from millrace.engine.kernels.cpu import WIDTH_MULTIPLE
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import (
    Shard,
    has_dense_layers,
    key_head_range,
    stage_layers,
    vocabulary_range,
)
from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import BlockPart


def check_shard(
    config: ModelConfig, shard_size: int, splits_experts: bool, num_stages: int = 1
) -> None:
    """Raise ConfigError if a model cannot be split over ranks and stages.

    Each of ``num_stages`` has at least one layer, and each layer is split over ``shard_size``
    ranks. The message has the numbers that do not divide, and the possible numbers of ranks.
    """
    _check_stages(config, num_stages)
    if shard_size < 1:
        raise ConfigError(f"engine.tensor_parallel is {shard_size}; there is at least 1 rank.")
    if splits_experts and config.experts is None:
        raise ConfigError(
            f"engine.expert_parallel splits the experts of a mixture over the ranks, and "
            f"{config.architecture} of this checkpoint has none: leave it out."
        )
    reason = _why_not(config, shard_size, splits_experts=splits_experts)
    if reason is None:
        return
    fitting = [
        str(size)
        for size in range(1, config.num_attention_heads + 1)
        if _why_not(config, size, splits_experts=splits_experts) is None
    ]
    raise ConfigError(
        f"engine.tensor_parallel is {shard_size}, but {reason}; this model can be split over "
        f"{', '.join(fitting)}."
    )


def block_part(config: ModelConfig, shard: Shard) -> BlockPart:
    """Return a rank's part of the KV cache's blocks, for a whole model's ``config``."""
    layers, heads = stage_layers(config, shard), key_head_range(config, shard)
    return BlockPart(layers.start, len(layers), heads.start, len(heads))


def _check_stages(config: ModelConfig, num_stages: int) -> None:
    if num_stages < 1:
        raise ConfigError(f"engine.pipeline_parallel is {num_stages}; there is at least 1 stage.")
    if num_stages > config.num_hidden_layers:
        raise ConfigError(
            f"engine.pipeline_parallel is {num_stages}, but each stage has a layer at least, and "
            f"this model has {config.num_hidden_layers}: take as many stages or fewer."
        )


def _why_not(config: ModelConfig, size: int, *, splits_experts: bool) -> str | None:
    if size == 1:
        return None
    num_heads, num_key_heads = config.num_attention_heads, config.num_key_value_heads
    if num_heads % size:
        return f"{num_heads} query heads do not divide by {size}"
    if num_key_heads % size and size % num_key_heads:
        return (
            f"{num_key_heads} heads of keys and values neither divide by {size} ranks nor can "
            "equally many ranks have each of them"
        )
    if has_dense_layers(config) and config.intermediate_size % (size * WIDTH_MULTIPLE):
        return _uneven("an MLP", config.intermediate_size, size)
    if not vocabulary_range(config.vocab_size, Shard(size - 1, size)):
        return f"a vocabulary of {config.vocab_size} tokens leaves none for the last of {size}"
    return _why_not_experts(config, size, splits_experts=splits_experts)


def _why_not_experts(config: ModelConfig, size: int, *, splits_experts: bool) -> str | None:
    if config.experts is None:
        return None
    num_experts, inner = config.experts.num_experts, config.experts.intermediate_size
    if splits_experts:
        return f"{num_experts} experts do not divide by {size}" if num_experts % size else None
    return _uneven("an expert", inner, size) if inner % (size * WIDTH_MULTIPLE) else None


def _uneven(what: str, inner: int, size: int) -> str:
    return (
        f"the intermediate size {inner} of {what} does not make {size} slices that are multiples "
        f"of {WIDTH_MULTIPLE}"
    )
