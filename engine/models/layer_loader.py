"""Loader of one layer's weights, or of a rank's slices of them."""

from __future__ import annotations

from typing import NamedTuple

from millrace.engine.kernels.operations import HeadNorms, Linear
from millrace.engine.models.decoder import LayerWeights
from millrace.engine.models.linears import ReducedLinear
from millrace.engine.models.mlp import (
    MLP,
    ExpertLoad,
    GatedMLP,
    MixtureOfExperts,
    ReducedExperts,
)
from millrace.engine.models.stacked_experts import StackedExperts
from millrace.engine.models.weight_reader import EVERYTHING, Slices, WeightReader
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import Experts, ExpertsConfig, family_of
from millrace.registry.checkpoints.shard import attention_slices, even_range, mlp_slices


class _MLPNames(NamedTuple):
    gate: str
    up: str
    down: str


_USUAL_NAMES = _MLPNames("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = _MLPNames("w1", "w3", "w2")


def load_layer(
    reader: WeightReader,
    config: ModelConfig,
    prefix: str,
    *,
    number: int = 0,
    num_inputs: int | None = None,
) -> LayerWeights:
    """Load layer ``number``, with tensors below ``prefix``, or the shard's slices of it.

    Its attention has ``num_inputs`` inputs; the default is the hidden size.
    """
    hidden = config.hidden_size
    slices = attention_slices(config, reader.shard)
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = prefix + "self_attn."
    head_norms = None
    if config.qk_norm:
        shape = (config.head_dim,)
        head_norms = HeadNorms(
            reader.tensor(attention + "q_norm.weight", shape),
            reader.tensor(attention + "k_norm.weight", shape),
        )
    reader.skip(attention + "rotary_emb.inv_freq")
    return LayerWeights(
        attention_norm=reader.tensor(prefix + "input_layernorm.weight", (hidden,)),
        qkv=reader.fused(
            attention,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            num_inputs=num_inputs or hidden,
            bias=config.attention_bias,
            slices=slices,
        ),
        head_norms=head_norms,
        output=_reduced(
            reader,
            reader.fused(
                attention,
                {"o_proj": hidden},
                num_inputs=queries,
                bias=config.attention_output_bias,
                slices=slices,
            ),
        ),
        mlp_norm=reader.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
        mlp=_load_mlp(reader, config, number, prefix),
    )


def _reduced(reader: WeightReader, linear: Linear) -> Linear:
    """Sum ``linear`` over the ranks if it has a part of the inputs, else return it unchanged."""
    collectives = reader.makers.collectives
    return linear if collectives is None else ReducedLinear(linear, collectives)


def _load_mlp(reader: WeightReader, config: ModelConfig, number: int, prefix: str) -> MLP:
    collectives = reader.makers.collectives
    if config.experts is not None and number in config.experts.layers:
        mixture = _load_experts(reader, config, config.experts, prefix)
        return mixture if collectives is None else ReducedExperts(mixture, collectives)
    mlp = _load_gated(
        reader,
        prefix + "mlp.",
        _USUAL_NAMES,
        (config.hidden_size, config.intermediate_size),
        has_bias=config.mlp_bias,
        slices=mlp_slices(config.intermediate_size, reader.shard),
    )
    return mlp._replace(down=_reduced(reader, mlp.down))


def _load_experts(
    reader: WeightReader, config: ModelConfig, experts: ExpertsConfig, prefix: str
) -> MixtureOfExperts | StackedExperts:
    family = family_of(config.architecture)
    is_mixtral = family is not None and family.experts is Experts.MIXTRAL
    block = prefix + ("block_sparse_moe." if is_mixtral else "mlp.")
    names = _MIXTRAL_NAMES if is_mixtral else _USUAL_NAMES
    hidden, inner = config.hidden_size, experts.intermediate_size
    router = reader.widened(block + "gate", experts.num_experts, hidden)
    prefixes = [f"{block}experts.{expert}." for expert in range(experts.num_experts)]
    shard = reader.shard
    own, slices = range(experts.num_experts), EVERYTHING
    if shard.splits_experts:
        own = even_range(experts.num_experts, shard)
    else:
        slices = mlp_slices(inner, shard, names)
    for prefix in prefixes[: own.start] + prefixes[own.stop :]:
        for name in names:
            reader.skip_weight(prefix + name)
    mine = prefixes[own.start : own.stop]
    make = reader.makers.experts
    if make is not None:
        mixture = make(
            router,
            reader.stack(
                mine, {names.gate: inner, names.up: inner}, num_inputs=hidden, slices=slices
            ),
            reader.stack(mine, {names.down: hidden}, num_inputs=inner, slices=slices),
            experts,
        )
        is_part = len(mine) < len(prefixes)
        return mixture._replace(first_expert=own.start, is_part=is_part)
    return MixtureOfExperts(
        router=router,
        experts=tuple(
            _load_gated(reader, prefix, names, (hidden, inner), has_bias=False, slices=slices)
            for prefix in mine
        ),
        num_chosen=experts.num_chosen,
        normalized=experts.normalized,
        first_expert=own.start,
        load=ExpertLoad(experts.num_experts),
    )


def _load_gated(
    reader: WeightReader,
    prefix: str,
    names: _MLPNames,
    sizes: tuple[int, int],
    *,
    has_bias: bool,
    slices: Slices,
) -> GatedMLP:
    """Load an MLP, or slices of it, of ``sizes``: its inputs and its inner size."""
    hidden, inner = sizes
    return GatedMLP(
        gate_up=reader.fused(
            prefix,
            {names.gate: inner, names.up: inner},
            num_inputs=hidden,
            bias=has_bias,
            slices=slices,
        ),
        down=reader.fused(
            prefix, {names.down: hidden}, num_inputs=inner, bias=has_bias, slices=slices
        ),
    )
