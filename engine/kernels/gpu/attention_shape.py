"""Shape of a model's attention: heads, blocks and windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Shape of a model's attention.

    ``windows`` gives the number of tokens that a token sees in each layer, itself included, or None
    for all. ``softcap`` turns a score s into softcap * tanh(s / softcap). ``scale`` multiplies
    scores before that; None means head_dim**-0.5. ``block_size`` is the number of tokens in a block
    of the KV cache.

    Raises:
        ValueError: The shape is invalid.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: Sequence[int | None]
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads evenly"
            )
        if self.score_scale <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(f"scale {self.scale} and softcap {self.softcap} must be positive")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows {list(self.windows)} must be at least one token long")

    @property
    def score_scale(self) -> float:
        """Factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale
