"""Biases of logits, as servers take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def add_bias(sampling: dict[str, Any], bias: Mapping[int, float]) -> None:
    """Add to what sampling parameters have as ``logit_bias``, where JSON wants text for keys."""
    if not bias:
        return
    told: dict[str, float] = sampling.setdefault("logit_bias", {})
    for token_id, change in bias.items():
        told[str(token_id)] = told.get(str(token_id), 0.0) + change
