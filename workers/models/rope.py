"""Rotary position embedding: frequencies by the checkpoint's own rules, and the rotation."""

from __future__ import annotations

import math

import torch

from registry.checkpoint import ModelConfig
from schemas.errors import CheckpointError

SUPPORTED_ROPE_TYPES = ("linear", "llama3")


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair: float32 [head_dim / 2].

    Raises CheckpointError for a scaling that is not known or lacks a parameter.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    kind = scaling.get("rope_type")
    if kind == "linear":
        return plain / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(plain, scaling)
    raise CheckpointError(
        f"RoPE scaling {kind!r} is not supported; supported are none, "
        f"{', '.join(SUPPORTED_ROPE_TYPES)}."
    )


def _llama3(plain: torch.Tensor, scaling: dict[str, object]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between
    blended linearly in how many turns they make over the original context."""
    factor = _number(scaling, "factor")
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise CheckpointError(
            f"RoPE scaling needs high_freq_factor above low_freq_factor, got {high} and {low}."
        )
    turns = context * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / factor


def _number(scaling: dict[str, object], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"RoPE scaling needs a positive {name}, got {value!r}.")
    return float(value)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for ``rotate_``: each [num_tokens, 1, head_dim]."""
    angles = positions[:, None, None].to(torch.float32) * frequencies
    sines = angles.sin()
    cosines = angles.cos()
    return (
        torch.cat((cosines, cosines), -1).to(dtype),
        torch.cat((-sines, sines), -1).to(dtype),
    )


def rotate_(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn ``heads`` [num_tokens, num_heads, head_dim] in place; element i pairs with
    i + head_dim / 2."""
    other = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cosines).addcmul_(other, sines)
