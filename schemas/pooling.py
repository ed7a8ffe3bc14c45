"""How the embedding of a text is made of what the model computes for its tokens."""

from __future__ import annotations

from enum import StrEnum


class Pooling(StrEnum):
    """LAST takes the last token's hidden state, MEAN the mean over all tokens; both are taken
    behind the model's final norm and are not scaled to any length."""

    LAST = "last"
    MEAN = "mean"
