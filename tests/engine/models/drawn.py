"""Random small checkpoints, drawn by hypothesis: every family in every shape that it can have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from millrace.registry.checkpoints import families

# More than the widest window that slides, but for that of all tokens, and than any window of
# dynamic scaling.
NUM_TOKENS_OUT = 100
MAX_PROMPT_TOKENS = 60
_MAX_POSITIONS = 512

FAMILIES = tuple(families.FAMILIES)
_SWITCHED = ("Qwen2", "Qwen3", "Qwen3Moe")
_LISTED = ("Qwen2", "Qwen3")


@st.composite
def checkpoints(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw arguments of the family's configuration in transformers."""
    num_layers = draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    group_size = draw(st.integers(1, 4))
    num_heads = num_kv_heads * group_size
    # Half of them in shapes that compiled kernels take, the others in any.
    aligned = draw(st.booleans())
    unit = 16 if aligned else 1
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(50, 150)),
        # transformers wants a multiple of the heads of a Llama, for any head_dim.
        "hidden_size": max(1, draw(st.integers(16, 48)) // (num_heads * unit)) * num_heads * unit,
        "intermediate_size": max(1, draw(st.integers(10, 60)) // unit) * unit,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([32, 64] if aligned else [4, 6, 8, 16, 20])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "max_position_embeddings": _MAX_POSITIONS,
    }
    config |= draw(_ropes())
    if family in ("Llama", "Qwen3", "Qwen3Moe"):
        config["attention_bias"] = draw(st.booleans())
    if family == "Llama":
        config["mlp_bias"] = draw(st.booleans())
    if family != "Llama":
        config |= draw(_windows(family, num_layers))
    if config["rope_parameters"]["rope_type"] == "dynamic" and config.get("sliding_window") == 1:
        # Compared to transformers' decoding with a cache, which keeps all tokens for a window of 1.
        config["sliding_window"] = 2
    if family in ("Mixtral", "Qwen3Moe"):
        config |= draw(_experts(family, num_layers, unit))
    return config


@st.composite
def _windows(draw: st.DrawFn, family: str, num_layers: int) -> dict[str, Any]:
    """Draw windows: none, narrower than a block, a chunk or the prompt, or wider than all
    tokens."""
    window = draw(st.none() | st.integers(1, 70) | st.just(_MAX_POSITIONS))
    if family not in _SWITCHED:
        return {"sliding_window": window}
    if window is None:
        return {"use_sliding_window": False}
    switched = {"use_sliding_window": True, "sliding_window": window}
    if family not in _LISTED:
        return switched
    if draw(st.booleans()):
        return switched | {"max_window_layers": draw(st.integers(0, num_layers))}
    kinds = st.sampled_from(["full_attention", "sliding_attention"])
    listed = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
    return switched | {"layer_types": listed}


@st.composite
def _experts(draw: st.DrawFn, family: str, num_layers: int, unit: int) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 6))
    experts: dict[str, Any] = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
    }
    if family == "Mixtral":
        return experts
    return experts | {
        "moe_intermediate_size": max(1, draw(st.integers(4, 40)) // unit) * unit,
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, num_layers - 1), max_size=1)),
    }


@st.composite
def _ropes(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6])),
    }
    if kind == "default":
        return {"rope_parameters": rope}
    rope["factor"] = draw(st.floats(1.0, 8.0))
    if kind == "dynamic":
        # The trained window ends behind the prompt, where transformers with a cache and the rule
        # by position agree; the completion goes on far past it.
        window = MAX_PROMPT_TOKENS + draw(st.integers(2, 20))
        rope["factor"] += (MAX_PROMPT_TOKENS + NUM_TOKENS_OUT) / window
        return {"rope_parameters": rope, "max_position_embeddings": window}
    if kind == "llama3":
        rope["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        rope["high_freq_factor"] = rope["low_freq_factor"] + draw(st.floats(0.5, 4.0))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw(st.integers(16, _MAX_POSITIONS))
    if kind == "yarn":
        rope |= draw(_yarn_options())
    return {"rope_parameters": rope}


def _yarn_options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 1.5),
            "beta_fast": st.floats(8.0, 40.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
            "mscale": st.floats(0.5, 2.0),
            "mscale_all_dim": st.floats(0.5, 2.0),
        },
    )
