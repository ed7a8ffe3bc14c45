"""Part of a model at each rank, and models that cannot be split."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.models.shard import check_shard
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import ExpertsConfig
from millrace.registry.checkpoints.shard import (
    Shard,
    attention_slices,
    even_range,
    head_range,
    key_head_range,
    mlp_slices,
    shard_config,
    vocabulary_range,
)
from millrace.schemas.errors import ConfigError

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    vocab_size=1000,
    max_position_embeddings=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=256,
)
EXPERTS = ExpertsConfig(
    layers=(0, 1), num_experts=6, num_chosen=2, intermediate_size=192, normalized=True
)


def changed(**changes: Any) -> ModelConfig:
    return msgspec.structs.replace(MODEL, **changes)


def ranks_of(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


def tiles(ranges: list[range], number: int) -> None:
    """Assert that the ranges follow one another and cover ``number`` items."""
    assert [one for own in ranges for one in own] == list(range(number))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    key_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64]),
    widths=st.integers(1, 20),
    vocab_size=st.integers(16, 100_000),
)
def test_the_ranks_of_a_group_have_the_whole_model(
    size: int, key_heads: int, group: int, head_dim: int, widths: int, vocab_size: int
) -> None:
    config = changed(
        num_attention_heads=key_heads * group,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        intermediate_size=32 * widths,
        vocab_size=vocab_size,
    )
    try:
        check_shard(config, size, splits_experts=False)
    except ConfigError as error:
        # It names numbers of ranks that do, of which one always does.
        fitting = error.message.rpartition(" over ")[2].rstrip(".").split(", ")
        assert fitting[0] == "1"
        assert str(size) not in fitting
        for other in fitting:
            check_shard(config, int(other), splits_experts=False)
        return
    shards = ranks_of(size)
    tiles([head_range(config, shard) for shard in shards], key_heads * group)
    tokens = [vocabulary_range(vocab_size, shard) for shard in shards]
    tiles(tokens, vocab_size)
    assert all(len(own) == len(tokens[0]) and len(own) % 16 == 0 for own in tokens[:-1])
    assert 0 < len(tokens[-1]) <= len(tokens[0])
    for shard in shards:
        own = shard_config(config, shard)
        keys, queries = key_head_range(config, shard), head_range(config, shard)
        assert (own.num_attention_heads, own.num_key_value_heads) == (len(queries), len(keys))
        # Each query head with the key head that it has in the whole model.
        per_key = own.num_attention_heads // own.num_key_value_heads
        for index, head in enumerate(queries):
            assert keys[index // per_key] == head // group
        assert own.intermediate_size * size == config.intermediate_size
        assert own.vocab_size == vocab_size
    if size > 1:
        slices = [
            attention_slices(config, shard) | mlp_slices(32 * widths, shard) for shard in shards
        ]
        tiles([own["q_proj"].rows or range(0) for own in slices], key_heads * group * head_dim)
        tiles([own["o_proj"].columns or range(0) for own in slices], key_heads * group * head_dim)
        tiles([own["up_proj"].rows or range(0) for own in slices], 32 * widths)
        tiles([own["down_proj"].columns or range(0) for own in slices], 32 * widths)


def test_a_whole_model_is_not_sliced() -> None:
    odd = changed(num_attention_heads=7, num_key_value_heads=7, intermediate_size=33, vocab_size=5)
    check_shard(odd, 1, splits_experts=False)
    assert shard_config(odd, Shard()) is odd
    assert attention_slices(odd, Shard()) == mlp_slices(33, Shard()) == {}
    assert vocabulary_range(5, Shard()) == range(5)


def test_experts_are_split_or_sliced() -> None:
    config = changed(experts=EXPERTS, intermediate_size=100)
    sliced = shard_config(config, Shard(1, 2))
    assert sliced.experts is not None
    assert (sliced.experts.intermediate_size, sliced.experts.num_experts) == (96, 6)
    # No layer has an MLP of that size.
    assert sliced.intermediate_size == 100
    whole = shard_config(config, Shard(1, 2, splits_experts=True))
    assert whole.experts == EXPERTS
    tiles([even_range(6, shard) for shard in ranks_of(2)], 6)


REFUSED: list[Any] = [
    pytest.param({}, 3, False, "8 query heads do not divide by 3", "1, 2, 4, 8", id="heads"),
    pytest.param(
        {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 768}
        | {"vocab_size": 32_000},
        2,
        False,
        "3 heads of keys and values neither divide by 2 ranks",
        "1, 3, 6, 12",
        id="key-heads",
    ),
    pytest.param(
        {"intermediate_size": 96},
        2,
        False,
        "the intermediate size 96 of an MLP does not make 2 slices that are multiples of 32",
        "1",
        id="mlp",
    ),
    pytest.param(
        {"vocab_size": 100}, 8, False, "100 tokens leaves none for the last of 8", "1, 2, 4", id="v"
    ),
    pytest.param(
        {"experts": EXPERTS}, 4, False, "the intermediate size 192 of an expert", "1, 2", id="inner"
    ),
    pytest.param(
        {"experts": EXPERTS}, 4, True, "6 experts do not divide by 4", "1, 2", id="experts"
    ),
]


@pytest.mark.parametrize(("changes", "size", "splits_experts", "reason", "fitting"), REFUSED)
def test_models_that_cannot_be_split_so(
    changes: dict[str, Any], size: int, splits_experts: bool, reason: str, fitting: str
) -> None:
    message = f"tensor_parallel is {size}, but.*{re.escape(reason)}.* split over {fitting}\\."
    with pytest.raises(ConfigError, match=message):
        check_shard(changed(**changes), size, splits_experts)


def test_there_are_no_experts_to_split() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM of this checkpoint has none"):
        check_shard(MODEL, 2, splits_experts=True)


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 0; there is at least 1 rank"):
        check_shard(MODEL, 0, splits_experts=False)
