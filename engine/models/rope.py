"""Rotary position embedding: frequencies by the checkpoint's own rules, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from millrace.engine.kernels.operations import Rotation
from millrace.registry.checkpoints.checkpoint import ModelConfig

# Most positions whose rotations are tabulated on a CPU: 16 MiB for heads of 128.
_MOST_TABULATED = 32_768


class Rope:
    """Sines and cosines of positions.

    A rotation depends on the position alone, so a token's keys are the same in any chunk, any batch
    and any cache. For dynamic (NTK) scaling, whose frequencies depend on a sequence's length, the
    token at position p is rotated as the last of p + 1 tokens. transformers does the same when it
    decodes token by token with a cache, and up to the trained window there is no difference. In a
    longer prompt, transformers rotates every token as if it were the last.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        scaling = config.rope_scaling or {}
        self._frequencies = inverse_frequencies(config).to(device)
        self._amplitude: float = scaling.get("attention_factor", 1.0)
        self._window = config.max_position_embeddings
        # For the dynamic kind only: growth of the base with the length, and exponents of the base
        # for each frequency.
        is_dynamic = scaling.get("rope_type") == "dynamic"
        self._growth: float | None = scaling["factor"] if is_dynamic else None
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        self._shrinkage = -pairs / max(config.head_dim - 2, 1)
        self._table: Rotation | None = None
        if device.type == "cpu" and config.context_window_tokens <= _MOST_TABULATED:
            positions = torch.arange(config.context_window_tokens, device=device)
            self._table = self._computed(positions)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the rotations of the tokens at ``positions``, int64 [num_tokens]."""
        if self._table is None:
            return self._computed(positions)
        return Rotation(*(part.index_select(0, positions) for part in self._table))

    def _computed(self, positions: torch.Tensor) -> Rotation:
        angles = positions[:, None].to(torch.float32) * self._frequencies_at(positions)
        return Rotation(angles.cos() * self._amplitude, angles.sin() * self._amplitude)

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        if self._growth is None:
            return self._frequencies
        lengths = (positions[:, None] + 1).clamp(min=self._window).to(torch.float32)
        stretch = self._growth * lengths / self._window - (self._growth - 1.0)
        return self._frequencies * torch.pow(stretch, self._shrinkage)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return each pair's radians per position in the trained window: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type")
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32)
    if kind == "llama3":
        return _llama3(plain, scaling)
    if kind == "yarn":
        return _yarn(plain, config, scaling)
    return plain


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Scale frequencies as Llama 3.1.

    Long wavelengths are stretched by ``factor``, short ones are kept. Between them, the two are
    blended linearly in the number of turns over the original context.
    """
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = int(scaling["original_max_position_embeddings"])
    turns = context * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / float(scaling["factor"])


def _yarn(plain: torch.Tensor, config: ModelConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Scale frequencies as YaRN.

    Pairs with more than ``beta_fast`` turns over the original context are kept, pairs below
    ``beta_slow`` are stretched by ``factor``. Between them, the two are blended linearly in the
    index.
    """
    context = scaling["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        wavelengths = math.log(context / (turns * 2 * math.pi))
        return config.head_dim * wavelengths / (2 * math.log(config.rope_theta))

    first, last = index_of(scaling["beta_fast"]), index_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(len(plain), dtype=torch.float32) - first) / (last - first)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / float(scaling["factor"])
