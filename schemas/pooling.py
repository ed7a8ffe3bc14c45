"""Pooling of the hidden states that the model computes for a text's tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Pooling(StrEnum):
    """Method of pooling. LAST takes the last token's hidden state, MEAN the mean over all tokens;
    both are after the model's final norm and are not scaled. CLASSIFY applies the checkpoint's
    classification head to the last token's hidden state: a number for each label, before any
    activation."""

    LAST = "last"
    MEAN = "mean"
    CLASSIFY = "classify"


# Methods that make an embedding.
EmbeddingPooling = Literal["last", "mean"]
# Purpose of a model: tokens, embeddings, scores of pairs, labels of texts.
ModelTask = Literal["generate", "embed", "score", "classify"]
