"""OpenAI's request and response formats of ``POST /v1/embeddings``, with further fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.pooling import EmbeddingPooling

MAX_INPUTS = 2_048

# True means END, false means NONE.
Truncate = bool | Literal["NONE", "START", "END"]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/embeddings``. ``input`` is a text, a list of texts, a list of token ids or
    a list of such lists.

    ``dimensions`` cuts embeddings to their first numbers, scaled to length 1 again. ``pooling`` and
    ``normalize`` (scale to length 1) are extra fields; their default is the model's own.
    ``truncate_prompt_tokens`` keeps the last tokens of a longer input (-1: as many as fit).
    ``truncate`` says where an input that does not fit is cut; by default it is refused. A tenant's
    requests with a lower ``priority`` (default 0) are served earlier. ``metadata`` is stored in the
    request's row of analytics, as for chat completions.
    """

    model: str
    input: str | tuple[str | int | tuple[int, ...], ...]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    pooling: EmbeddingPooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncate: Truncate | None = None
    priority: int | None = None


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /pooling``. The answer is the embedding of each input or the ``probs`` of
    ``POST /classify``, depending on the model."""

    task: Literal["embed", "classify"] | None = None
    use_activation: bool | None = None


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding of input ``index``: an array of numbers, or their bytes (little-endian float32) in
    base64."""

    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> EmbeddingUsage:
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings, in the order of the inputs."""

    data: tuple[EmbeddingObject, ...]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class PoolingObject(msgspec.Struct, frozen=True, kw_only=True):
    """Pooled output of input ``index``, in the format of ``EmbeddingObject``."""

    index: int
    data: msgspec.Raw
    object: str = "pooling"


class PoolingList(msgspec.Struct, frozen=True, kw_only=True):
    """Pooled outputs, in the order of the inputs."""

    id: str
    created: int
    data: tuple[PoolingObject, ...]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /classify``, in the format of vLLM's servers. ``input`` is as for embeddings.
    If ``use_activation`` is false, the values are those before any activation."""

    model: str
    input: str | tuple[str | int | tuple[int, ...], ...]
    user: str | None = None
    metadata: dict[str, str] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    use_activation: bool | None = None


class ClassifiedText(msgspec.Struct, frozen=True, kw_only=True):
    """Class of input ``index``: the likeliest label, and the probability of each label."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int


class ClassifyList(msgspec.Struct, frozen=True, kw_only=True):
    """Classes, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: tuple[ClassifiedText, ...]
    usage: EmbeddingUsage
    object: str = "list"


class _Scoring(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of requests that score pairs of texts.

    A cross-encoder reads two texts at once. Its score is the model's number after its activation,
    unless ``use_activation`` is false. Texts of other models are compared by the cosine of their
    embeddings, with the model's own ``pooling`` unless the request names another.

    The first ``max_tokens_per_doc`` tokens of each document are read (``max_doc_length`` is another
    name), and the first ``max_query_length`` of each query. A text that does not fit the context
    window is cut at its end with ``truncate`` true or ``END``, and refused with false or ``NONE``.
    Without ``truncate`` it is refused, or cut with a notice if documents have a limit.
    """

    model: str
    user: str | None = None
    metadata: dict[str, str] | None = None
    pooling: EmbeddingPooling | None = None
    truncate_prompt_tokens: int | None = None
    truncate: Truncate | None = None
    max_tokens_per_doc: int | None = None
    max_doc_length: int | None = None
    max_query_length: int | None = None
    priority: int | None = None
    use_activation: bool | None = None


class ScoreRequest(_Scoring, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/score``: relevance or similarity of the second texts to the first, pair by
    pair. A single first text is paired with each second text. ``queries`` and ``documents`` are
    other names of ``text_1`` and ``text_2``."""

    text_1: str | tuple[str, ...] | None = None
    text_2: str | tuple[str, ...] | None = None
    queries: str | tuple[str, ...] | None = None
    documents: str | tuple[str, ...] | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Score of pair ``index``: a cosine between -1 and 1, or the number of a cross-encoder."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """Scores, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: tuple[Score, ...]
    usage: EmbeddingUsage
    object: str = "list"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class RerankRequest(_Scoring, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/rerank``, in the format of Jina's and Cohere's APIs and of vLLM's servers.
    The answer has the best ``top_n`` documents (0 or not given: all), with their texts unless
    ``return_documents`` is false. A document is a text or an object. The text of an object is its
    ``text``, or the fields named in ``rank_fields``: the value of one field, or several fields as
    YAML. ``max_chunks_per_doc`` has no effect: each document is read as one chunk."""

    query: str
    documents: tuple[str | dict[str, Any], ...]
    rank_fields: tuple[str, ...] | None = None
    max_chunks_per_doc: int | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class RankTextsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/rerank`` of Text Embeddings Inference: it has ``texts`` in place of ``documents``
    and names no model. Without ``model``, the only cross-encoder or the only model answers. With
    ``raw_scores``, scores are before the activation; with ``return_text``, the answer repeats the
    texts. A text that does not fit the context window is cut at its end with ``truncate``, else
    refused."""

    query: str
    texts: tuple[str, ...]
    model: str | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TextRank(msgspec.Struct, frozen=True, kw_only=True):
    """Score of text ``index`` in the format of Text Embeddings Inference. The answer is a list of
    scores, the most relevant text first."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document ``index`` of the request with its score: a cosine between -1 and 1, or the number of
    a cross-encoder. ``document`` is the request's object unchanged, or an object with the request's
    text as ``text``."""

    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class RerankList(msgspec.Struct, frozen=True, kw_only=True):
    """Documents with scores, the most relevant first."""

    id: str
    model: str
    results: tuple[RankedDocument, ...]
    usage: EmbeddingUsage
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)
