"""Names of a GGUF file's tensors in checkpoints of Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Frequencies of RoPE, which the configuration has.
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.(?P<part>weight|bias)")
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROUTER = "ffn_gate_inp"
# Stacks of all experts' weights, with the name of an expert's own module in Qwen and in Mixtral.
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj", "w1"),
    "ffn_up_exps": ("up_proj", "w3"),
    "ffn_down_exps": ("down_proj", "w2"),
}


class TensorPlace(NamedTuple):
    """Tensor of a GGUF file, or one of the ``expert``s of a stack."""

    name: str
    expert: int | None = None


class CheckpointNames(NamedTuple):
    """Places of a file's tensors by their names in a checkpoint; ``unknown`` have no such name."""

    places: Mapping[str, TensorPlace]
    unknown: tuple[str, ...]


def checkpoint_names(shapes: Mapping[str, tuple[int, ...]], *, is_mixtral: bool) -> CheckpointNames:
    """Return the checkpoint's names of tensors, whose ``shapes`` have the experts last."""
    places: dict[str, TensorPlace] = {}
    unknown = []
    for name, shape in shapes.items():
        if name == _ROPE_FACTORS:
            continue
        found = _of_tensor(name, shape, is_mixtral=is_mixtral)
        if not found:
            unknown.append(name)
        places |= found
    return CheckpointNames(places, tuple(unknown))


def _of_tensor(name: str, shape: tuple[int, ...], *, is_mixtral: bool) -> dict[str, TensorPlace]:
    module, _, part = name.rpartition(".")
    if module in _WHOLE and part == "weight":
        return {f"{_WHOLE[module]}.weight": TensorPlace(name)}
    found = _LAYER.fullmatch(name)
    if found is None:
        return {}
    prefix, module = f"model.layers.{int(found['layer'])}.", found["module"]
    if module in _MODULES:
        return {f"{prefix}{_MODULES[module]}.{part}": TensorPlace(name)}
    block = prefix + ("block_sparse_moe." if is_mixtral else "mlp.")
    if module == _ROUTER and part == "weight":
        return {f"{block}gate.weight": TensorPlace(name)}
    if module in _EXPERTS and part == "weight" and len(shape) == 3:
        own = _EXPERTS[module][is_mixtral]
        return {
            f"{block}experts.{expert}.{own}.weight": TensorPlace(name, expert)
            for expert in range(shape[-1])
        }
    return {}
