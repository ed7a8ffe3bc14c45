"""Models that several ranks can compute."""

from __future__ import annotations

from typing import Any

# As the compiled kernels take them, in float32 with one rank's tokens for as many ranks as there
# are heads; with 4 ranks, two have each head of keys and values.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE: dict[str, Any] = SHAPE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
