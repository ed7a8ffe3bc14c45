"""Layers of each stage, and models with too few layers."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.models.shard import check_shard
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import ExpertsConfig
from millrace.registry.checkpoints.shard import Shard, layer_weights, shard_config, stage_layers
from millrace.schemas.errors import ConfigError
from tests.engine.models.test_shard_ranges import EXPERTS, MODEL, changed, tiles


def stages_of(num_stages: int, rank: int = 0, size: int = 1) -> list[Shard]:
    return [Shard(rank, size, stage=stage, num_stages=num_stages) for stage in range(num_stages)]


def loads_of(config: ModelConfig, ends: tuple[int, ...]) -> list[int]:
    """Return the number of weights of stages with these ends, largest first."""
    weights = layer_weights(config)
    loads = [sum(weights[begin:end]) for begin, end in pairwise((0, *ends))]
    loads[-1] += config.vocab_size * config.hidden_size * config.has_head
    return sorted(loads, reverse=True)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    num_layers = draw(st.integers(1, 9))
    layers = st.lists(st.integers(0, num_layers - 1), unique=True).map(sorted).map(tuple)
    mixtures, sliding = draw(layers), draw(layers)
    return changed(
        num_hidden_layers=num_layers,
        vocab_size=draw(st.integers(16, 20_000)),
        has_head=draw(st.booleans()),
        sliding_window=20 if sliding else None,
        sliding_layers=sliding,
        experts=msgspec.structs.replace(EXPERTS, layers=mixtures) if mixtures else None,
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(config=models(), num_stages=st.integers(1, 5))
def test_the_stages_have_the_whole_model(config: ModelConfig, num_stages: int) -> None:
    num_layers = config.num_hidden_layers
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=rf"at least, and this model has {num_layers}:"):
            check_shard(config, 1, splits_experts=False, num_stages=num_stages)
        return
    check_shard(config, 1, splits_experts=False, num_stages=num_stages)
    stages = stages_of(num_stages)
    layers = [stage_layers(config, stage) for stage in stages]
    tiles(layers, num_layers)
    assert all(layers)
    # No other split has a lighter heaviest stage, nor of these a lighter second one.
    ends = (tuple(one) for one in combinations(range(1, num_layers), num_stages - 1))
    best = min(loads_of(config, (*inner, num_layers)) for inner in ends)
    assert loads_of(config, tuple(own.stop for own in layers)) == best
    # What is by layer is each layer's own.
    configs = [shard_config(config, stage) for stage in stages]
    windows = chain.from_iterable(own.windows for own in configs)
    assert tuple(windows) == config.windows
    weights = chain.from_iterable(layer_weights(own) for own in configs)
    assert list(weights) == layer_weights(config)
    for own in configs:
        assert own.experts is None or own.experts.layers
        assert (own.vocab_size, own.intermediate_size) == (config.vocab_size, 256)


def test_a_stage_of_several_ranks_has_slices_of_its_layers() -> None:
    config = changed(
        num_hidden_layers=4, experts=msgspec.structs.replace(EXPERTS, layers=(3,)), vocab_size=16
    )
    first, last = (shard_config(config, stage) for stage in stages_of(2, rank=1, size=2))
    assert first.num_hidden_layers == 3
    assert (first.num_attention_heads, first.intermediate_size, first.experts) == (4, 128, None)
    assert last.num_hidden_layers == 1
    assert last.experts == ExpertsConfig(
        layers=(0,), num_experts=6, num_chosen=2, intermediate_size=96, normalized=True
    )


def test_the_head_counts_as_layers_do_and_the_embedding_does_not() -> None:
    layer = layer_weights(MODEL)[0]
    config = changed(num_hidden_layers=10, vocab_size=2 * layer // MODEL.hidden_size)
    assert [len(stage_layers(config, stage)) for stage in stages_of(2)] == [6, 4]
    assert [len(stage_layers(config, stage)) for stage in stages_of(3)] == [4, 4, 2]
    without = msgspec.structs.replace(config, has_head=False)
    assert [len(stage_layers(without, stage)) for stage in stages_of(2)] == [5, 5]
    # A head that outweighs all of them leaves its stage one layer, and the rest is shared evenly.
    wide = msgspec.structs.replace(config, vocab_size=100 * config.vocab_size)
    assert [len(stage_layers(wide, stage)) for stage in stages_of(4)] == [3, 3, 3, 1]


def test_deep_models_are_split_at_once() -> None:
    config = changed(num_hidden_layers=126)
    lengths = [len(stage_layers(config, stage)) for stage in stages_of(16)]
    assert sum(lengths) == 126
    assert max(lengths) == 8


def test_shard_is_whole_only_with_all_layers() -> None:
    assert Shard().is_whole
    assert not Shard(0, 2).is_whole
    first, middle, last = stages_of(3)
    assert not first.is_whole
    assert [stage.is_first for stage in (first, middle, last)] == [True, False, False]
    assert [stage.is_last for stage in (first, middle, last)] == [False, False, True]
    assert not any(stage.is_sliced for stage in (first, middle, last))


def test_zero_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel is 0; there is at least 1 stage"):
        check_shard(MODEL, 1, splits_experts=False, num_stages=0)


def test_more_stages_than_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine\.pipeline_parallel is 3, .* has 2: take"):
        check_shard(MODEL, 1, splits_experts=False, num_stages=3)
