"""Small random EAGLE-3 heads in the published layouts, and plain torch's results for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import save_file

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 448,
    "draft_vocab_size": 160,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    },
}
Tensors = dict[str, torch.Tensor]


def head_tensors(config: Mapping[str, Any], *, prefix: str = "midlayer.") -> Tensors:
    """Draw the tensors of the head, without an embedding."""
    generator = torch.Generator().manual_seed(11)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    size = config["draft_vocab_size"]
    fused = 3 * config.get("target_hidden_size", hidden)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (
            torch.randn(rows, columns, generator=generator) * (2 / math.sqrt(columns))
        ).bfloat16()

    def norm() -> torch.Tensor:
        return (1 + 0.3 * torch.randn(hidden, generator=generator)).bfloat16()

    target_ids = torch.randperm(config["vocab_size"], generator=generator)[:size].sort().values
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[target_ids] = True
    return {
        "fc.weight": normal(hidden, fused),
        f"{prefix}hidden_norm.weight": norm(),
        f"{prefix}input_layernorm.weight": norm(),
        f"{prefix}self_attn.q_proj.weight": normal(queries, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": normal(keys, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": normal(keys, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": normal(hidden, queries),
        f"{prefix}post_attention_layernorm.weight": norm(),
        f"{prefix}mlp.gate_proj.weight": normal(inner, hidden),
        f"{prefix}mlp.up_proj.weight": normal(inner, hidden),
        f"{prefix}mlp.down_proj.weight": normal(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": normal(size, hidden),
        "d2t": target_ids - torch.arange(size),
        "t2d": known,
    }


def save_head(path: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Save a head in the folder ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def reference_logits(
    config: Mapping[str, Any],
    tensors: Tensors,
    embedding: torch.Tensor,
    token_ids: list[int],
    features: torch.Tensor,
    num_drafted: int = 0,
) -> torch.Tensor:
    """Return the head's logits over the draft's own tokens after each of ``token_ids``, in float32:
    [num_tokens, draft_vocab_size]. Token i stands beside ``features[i]``, the features of the token
    before it; each of the last ``num_drafted`` stands beside the head's own output for the token
    before."""
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    own = {
        name.removeprefix(prefix).removesuffix(".weight"): tensor
        for name, tensor in wide.items()
        if name.startswith(prefix)
    }
    embedding = wide.get("embed_tokens.weight", embedding.float())
    num_known = len(token_ids) - num_drafted
    outputs: list[torch.Tensor] = []
    for end in range(num_known, len(token_ids) + 1):
        hidden = F.linear(features[:num_known].float(), wide["fc.weight"])
        if outputs:
            hidden = torch.cat([hidden, *outputs])
        out = _layer(config, own, embedding[token_ids[:end]], hidden)
        outputs.append(out[-1:])
    normed = _norm(config, out, wide["norm.weight"])
    return F.linear(normed, wide["lm_head.weight"])


def _norm(config: Mapping[str, Any], rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    epsilon: float = config["rms_norm_eps"]
    return rows * (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _layer(
    config: Mapping[str, Any], own: Tensors, embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Compute the whole layer for every token, over all tokens before it."""
    num_tokens, size = len(hidden), config["head_dim"]
    normed = _norm(config, hidden, own["hidden_norm"])
    both = torch.cat((_norm(config, embedded, own["input_layernorm"]), normed), -1)
    queries, keys, values = (
        F.linear(both, own[f"self_attn.{name}_proj"]).view(num_tokens, -1, size).transpose(0, 1)
        for name in "qkv"
    )
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    keys = _turned(keys).repeat_interleave(group, 0)
    values = values.repeat_interleave(group, 0)
    scores = _turned(queries) @ keys.transpose(1, 2) / size**0.5
    scores = scores.masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
    total = normed if config.get("norm_before_residual") else hidden
    total = total + F.linear(attended, own["self_attn.o_proj"])
    inner = _norm(config, total, own["post_attention_layernorm"])
    gated = F.silu(F.linear(inner, own["mlp.gate_proj"])) * F.linear(inner, own["mlp.up_proj"])
    return total + F.linear(gated, own["mlp.down_proj"])


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """Rotate [num_heads, num_tokens, head_dim] by RoPE with a theta of 10,000."""
    num_tokens, size = heads.shape[1:]
    pairs = torch.arange(0, size, 2).float() / size
    angles = torch.arange(num_tokens).float()[:, None] / 10_000.0**pairs
    first, second = heads.chunk(2, -1)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
