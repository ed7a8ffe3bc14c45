"""Which part of a checkpoint one rank has, where several compute a model: some of the layers, which
are a stage, and slices of the tensors of these.

Attention is split by heads and MLPs by what is between their two products: the first product of
each has the outputs of a rank, the second the same inputs, and its results are summed over the
ranks of the stage.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import msgspec

from millrace.registry.checkpoints.checkpoint import ModelConfig

# Of a rank's tokens: what the kernels lay out together.
_VOCABULARY_STEP = 16


class Shard(NamedTuple):
    """Which part of a model one rank of a group of ``size`` computes: its heads, its slice of each
    MLP and of the vocabulary; of a mixture its slice of every expert, or if ``splits_experts`` some
    of the experts whole. The group computes one ``stage`` of ``num_stages``, the layers that
    ``stage_layers`` says: the first stage embeds tokens, the last one makes logits and labels."""

    rank: int = 0
    size: int = 1
    splits_experts: bool = False
    stage: int = 0
    num_stages: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the model."""
        return self.size == 1 and self.num_stages == 1

    @property
    def is_sliced(self) -> bool:
        """Whether tensors are split over ranks, whose products have to be summed."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether its stage is the first."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage is the last."""
        return self.stage == self.num_stages - 1


class Slice(NamedTuple):
    """Of a matrix [num_rows, num_columns]; None is all of them."""

    rows: range | None = None
    columns: range | None = None


WHOLE = Slice()
WHOLE_MODEL = Shard()


def even_range(number: int, shard: Shard) -> range:
    """The rank's of so many things, which divide by the ranks."""
    each = number // shard.size
    return range(shard.rank * each, (shard.rank + 1) * each)


def head_range(config: ModelConfig, shard: Shard) -> range:
    """The rank's query heads, of those of the whole model's ``config``."""
    return even_range(config.num_attention_heads, shard)


def key_head_range(config: ModelConfig, shard: Shard) -> range:
    """The heads of keys and values that the rank's query heads attend to; with fewer of them than
    ranks, neighbouring ranks have the same one."""
    num_heads = config.num_key_value_heads
    if num_heads >= shard.size:
        return even_range(num_heads, shard)
    head = shard.rank * num_heads // shard.size
    return range(head, head + 1)


def vocabulary_range(vocab_size: int, shard: Shard) -> range:
    """The tokens whose embeddings and logits the rank has. Ranks have equally many, a multiple of
    16; but the last one has what is left."""
    each = -(-vocab_size // (shard.size * _VOCABULARY_STEP)) * _VOCABULARY_STEP
    if not shard.is_sliced:
        each = vocab_size
    begin = min(shard.rank * each, vocab_size)
    return range(begin, min(begin + each, vocab_size))


def vocabulary_slice(vocab_size: int, shard: Shard) -> Slice:
    """The same of an embedding or a head [vocab_size, hidden_size]."""
    if not shard.is_sliced:
        return WHOLE
    return Slice(rows=vocabulary_range(vocab_size, shard))


def attention_slices(config: ModelConfig, shard: Shard) -> dict[str, Slice]:
    """Of the weights [num_outputs, num_inputs] of attention, by their names in a layer; of none
    where ranks have whole layers."""
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
    """Of the weights of an MLP or of an expert, by their ``names``: gate, up and down; of none
    where ranks have whole layers."""
    if not shard.is_sliced:
        return {}
    inner = even_range(intermediate_size, shard)
    gate, up, down = names
    return {gate: Slice(rows=inner), up: Slice(rows=inner), down: Slice(columns=inner)}


def stage_layers(config: ModelConfig, shard: Shard) -> range:
    """The layers of the shard's stage, of those of the whole model's ``config``, for which
    ``check_shard`` has nothing to say: the split whose stage of most weights has the fewest, then
    the one of second most, and so on. The head counts with the last stage's layers; the embedding,
    which is looked up, does not count."""
    if shard.num_stages == 1:
        return range(config.num_hidden_layers)
    ends = _stage_ends(config, shard.num_stages)
    return range(ends[shard.stage], ends[shard.stage + 1])


def _stage_ends(config: ModelConfig, num_stages: int) -> list[int]:
    """Where the first stage begins, then where each one ends."""
    num_layers, head = config.num_hidden_layers, 0
    if config.has_head:
        head = config.vocab_size * config.hidden_size
    before = [0, *accumulate(layer_weights(config))]
    # By their end, the best splits of the layers before it into as many stages as were counted:
    # the weights of the stages, most first, and their ends.
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
    """How many weights each layer has, norms and biases left out."""
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
    """The heads and widths that a rank computes of a whole model's ``config``, for which
    ``check_shard`` has nothing to say, and the layers of its stage, counted from its first; the
    vocabulary, and how many experts there are, stay those of all ranks."""
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
    """The layers of a stage, of whole width."""
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
    """Whether any layer has an MLP, and no experts."""
    return config.experts is None or len(config.experts.layers) < config.num_hidden_layers


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
