"""What is made of the hidden states that the model computes for the tokens of a text."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Pooling(StrEnum):
    """LAST takes the last token's hidden state, MEAN the mean over all tokens; both are taken
    behind the model's final norm and are not scaled to any length. CLASSIFY takes the last token's
    through the checkpoint's classification head: a number for each label, before any activation."""

    LAST = "last"
    MEAN = "mean"
    CLASSIFY = "classify"


# Those that make an embedding.
EmbeddingPooling = Literal["last", "mean"]
# What a model is for: tokens, embeddings, scores of pairs, labels of texts.
ModelTask = Literal["generate", "embed", "score", "classify"]
