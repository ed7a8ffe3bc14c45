"""The mixture-of-experts layers of a checkpoint: how many experts, and which layers have them."""

from __future__ import annotations

import msgspec

from millrace.registry.checkpoints.families import Experts, Family
from millrace.registry.checkpoints.json_fields import JsonFields


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """In ``layers`` (rising), ``num_chosen`` of ``num_experts`` MLPs of ``intermediate_size``
    compute each token; their weights are softmax probabilities over all experts, divided by their
    sum if ``normalized``."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalized: bool


def read_experts(fields: JsonFields, family: Family, num_layers: int) -> ExpertsConfig | None:
    """What ``config.json`` says about experts; None if no layer has any.

    Raises CheckpointError naming the field for a number that cannot be.
    """
    if family.experts is Experts.NONE:
        return None
    by_qwen = family.experts is Experts.QWEN
    layers = _qwen_layers(fields, num_layers) if by_qwen else tuple(range(num_layers))
    if not layers:
        return None
    name = "num_experts" if by_qwen and fields.get("num_experts") is not None else None
    num_experts = fields.positive_int(name or "num_local_experts", family.num_experts)
    num_chosen = fields.positive_int("num_experts_per_tok", family.num_chosen_experts)
    if num_chosen > num_experts:
        raise fields.bad("num_experts_per_tok", f"at most the number of experts ({num_experts})")
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.positive_int(
            "moe_intermediate_size" if by_qwen else "intermediate_size"
        ),
        normalized=fields.boolean("norm_topk_prob", default=False) if by_qwen else True,
    )


def _qwen_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.bad("mlp_only_layers", "a list of layer numbers")
    sparse = range(step - 1, num_layers, step)
    return tuple(layer for layer in sparse if layer not in dense)
