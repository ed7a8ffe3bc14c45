"""OpenAI's request and response shapes of ``POST /v1/embeddings``, and what is added to them."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.pooling import Pooling

MAX_INPUTS = 2_048


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``input`` is a text, a list of texts, a list of token ids or a list of such lists.

    ``dimensions`` cuts embeddings to their first numbers, scaled to length 1 again. ``pooling`` and
    ``normalize`` (scale to length 1) are extra fields; left out, they are the model's own. Of a
    longer input the last ``truncate_prompt_tokens`` tokens are kept (-1: as many as fit).
    """

    model: str
    input: str | tuple[str | int | tuple[int, ...], ...]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of input ``index``: an array of numbers, or their bytes (little-endian float32)
    in base64."""

    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the inputs."""

    data: tuple[EmbeddingObject, ...]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
