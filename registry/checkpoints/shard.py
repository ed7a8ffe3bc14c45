"""Shard of a checkpoint: the part of a model that one rank computes.

A rank has some of the layers (a pipeline stage) and slices of their tensors (tensor parallelism).
Attention is split by heads. MLPs are split along the intermediate size: a rank has some outputs of
the first product and the same inputs of the second, whose results are summed over the ranks of the
stage.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import msgspec

from millrace.registry.checkpoints.checkpoint import ModelConfig

# Granularity of a rank's tokens: the kernels' tile.
_VOCABULARY_STEP = 16


class Shard(NamedTuple):
    """Part of a model that one rank of a group of ``size`` computes.

    The rank has its heads and its slice of each MLP and of the vocabulary. Of a mixture of experts
    it has a slice of every expert, or some experts whole if ``splits_experts``. The group computes
    one ``stage`` of ``num_stages``, with the layers of ``stage_layers``. The first stage embeds
    tokens; the last one makes logits and labels.
    """

    rank: int = 0
    size: int = 1
    splits_experts: bool = False
    stage: int = 0
    num_stages: int = 1

    @property
    def is_whole(self) -> bool:
        """True if the shard is the whole model."""
        return self.size == 1 and self.num_stages == 1

    @property
    def is_sliced(self) -> bool:
        """True if tensors are split over ranks, so that products have to be summed."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """True if its stage is the first."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if its stage is the last."""
        return self.stage == self.num_stages - 1


class Slice(NamedTuple):
    """Slice of a matrix [num_rows, num_columns]; None is all of them."""

    rows: range | None = None
    columns: range | None = None


WHOLE = Slice()
WHOLE_MODEL = Shard()


def even_range(number: int, shard: Shard) -> range:
    """Return the rank's part of ``number`` items, which must divide evenly among the ranks."""
    each = number // shard.size
    return range(shard.rank * each, (shard.rank + 1) * each)


def head_range(config: ModelConfig, shard: Shard) -> range:
    """Return the rank's query heads, of those in the whole model's ``config``."""
    return even_range(config.num_attention_heads, shard)


def key_head_range(config: ModelConfig, shard: Shard) -> range:
    """Return the key-value heads that the rank's query heads attend to.

    With fewer key-value heads than ranks, neighbouring ranks share a head.
    """
    num_heads = config.num_key_value_heads
    if num_heads >= shard.size:
        return even_range(num_heads, shard)
    head = shard.rank * num_heads // shard.size
    return range(head, head + 1)


def vocabulary_range(vocab_size: int, shard: Shard) -> range:
    """Return the tokens whose embeddings and logits the rank has.

    Ranks have equally many, a multiple of 16; the last rank has the remainder.
    """
    each = -(-vocab_size // (shard.size * _VOCABULARY_STEP)) * _VOCABULARY_STEP
    if not shard.is_sliced:
        each = vocab_size
    begin = min(shard.rank * each, vocab_size)
    return range(begin, min(begin + each, vocab_size))


def vocabulary_slice(vocab_size: int, shard: Shard) -> Slice:
    """Return the rank's slice of an embedding or a head [vocab_size, hidden_size]."""
    if not shard.is_sliced:
        return WHOLE
    return Slice(rows=vocabulary_range(vocab_size, shard))


def attention_slices(config: ModelConfig, shard: Shard) -> dict[str, Slice]:
    """Return the slices of attention's weights [num_outputs, num_inputs], by their names in a
    layer; empty if ranks have whole layers.
    """
    if not shard.is_sliced:
        return {}
    queries = _elements(head_range(config, shard), config.head_dim)
    keys = _elements(key_head_range(config, shard), config.head_dim)
    return {
        "q_proj": Slice(rows=queries),
        "k_proj": Slice(rows=keys),
        "v_proj": Slice(rows=keys),
        "o_proj": Slice(columns=queries),
    }


def mlp_slices(
    intermediate_size: int,
    shard: Shard,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Slice]:
    """Return the slices of the weights of an MLP or of an expert, by their ``names`` (gate, up,
    down); empty if ranks have whole layers.
    """
    if not shard.is_sliced:
        return {}
    inner = even_range(intermediate_size, shard)
    gate, up, down = names
    return {gate: Slice(rows=inner), up: Slice(rows=inner), down: Slice(columns=inner)}


def stage_layers(config: ModelConfig, shard: Shard) -> range:
    """Return the layers of the shard's stage.

    The split minimizes the weights of the largest stage, then of the second largest, and so on. The
    head counts with the last stage. The embedding does not count, as it is only looked up.
    ``config`` is the whole model's and must pass ``check_shard``.
    """
    if shard.num_stages == 1:
        return range(config.num_hidden_layers)
    ends = _stage_ends(config, shard.num_stages)
    return range(ends[shard.stage], ends[shard.stage + 1])


def _stage_ends(config: ModelConfig, num_stages: int) -> list[int]:
    """Return the start of the first stage, followed by the end of each stage."""
    num_layers, head = config.num_hidden_layers, 0
    if config.has_head:
        head = config.vocab_size * config.hidden_size
    before = [0, *accumulate(layer_weights(config))]
    # Best splits of the layers before each end into the stages so far: the weights of the stages,
    # largest first, and their ends.
    best: dict[int, tuple[list[int], list[int]]] = {0: ([], [0])}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        num_behind = num_stages - 1 - stage
        first_end = num_layers if is_last else stage + 1
        best = {
            end: min(
                (
                    sorted([*weights, before[end] - before[begin] + head * is_last], reverse=True),
                    [*ends, end],
                )
                for begin, (weights, ends) in best.items()
                if begin < end
            )
            for end in range(first_end, num_layers - num_behind + 1)
        }
    return best[num_layers][1]


def layer_weights(config: ModelConfig) -> list[int]:
    """Return the number of weights of each layer, without norms and biases."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    attention = heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = [attention + mlp] * config.num_hidden_layers
    experts = config.experts
    if experts is not None:
        each = config.hidden_size * (3 * experts.intermediate_size + 1)
        for layer in experts.layers:
            weights[layer] = attention + experts.num_experts * each
    return weights


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the config of a shard: the rank's heads and widths, and the layers of its stage.

    Layers are counted from the stage's first. The vocabulary and the number of experts stay those
    of all ranks. ``config`` is the whole model's and must pass ``check_shard``.
    """
    config = _stage_config(config, shard)
    if not shard.is_sliced:
        return config
    experts = config.experts
    if experts is not None and not shard.splits_experts:
        inner = experts.intermediate_size // shard.size
        experts = msgspec.structs.replace(experts, intermediate_size=inner)
    intermediate_size = config.intermediate_size
    if has_dense_layers(config):
        intermediate_size //= shard.size
    return msgspec.structs.replace(
        config,
        num_attention_heads=len(head_range(config, shard)),
        num_key_value_heads=len(key_head_range(config, shard)),
        intermediate_size=intermediate_size,
        experts=experts,
    )


def _stage_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the config of a stage's layers, at full width."""
    if shard.num_stages == 1:
        return config
    layers = stage_layers(config, shard)
    experts = config.experts
    if experts is not None:
        own = _counted_from_first(experts.layers, layers)
        experts = msgspec.structs.replace(experts, layers=own) if own else None
    return msgspec.structs.replace(
        config,
        num_hidden_layers=len(layers),
        sliding_layers=_counted_from_first(config.sliding_layers, layers),
        experts=experts,
    )


def _counted_from_first(numbers: tuple[int, ...], layers: range) -> tuple[int, ...]:
    return tuple(number - layers.start for number in numbers if number in layers)


def has_dense_layers(config: ModelConfig) -> bool:
    """Return whether any layer has a dense MLP instead of experts."""
    return config.experts is None or len(config.experts.layers) < config.num_hidden_layers


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
