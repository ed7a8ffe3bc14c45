"""OpenAI's request and response shapes of ``POST /v1/embeddings``, and what is added to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.pooling import EmbeddingPooling

MAX_INPUTS = 2_048

# True is END, false is NONE.
Truncate = bool | Literal["NONE", "START", "END"]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``input`` is a text, a list of texts, a list of token ids or a list of such lists.

    ``dimensions`` cuts embeddings to their first numbers, scaled to length 1 again. ``pooling`` and
    ``normalize`` (scale to length 1) are extra fields; left out, they are the model's own. Of a
    longer input the last ``truncate_prompt_tokens`` tokens are kept (-1: as many as fit).
    ``truncate`` says where an input that does not fit is cut; by default it is refused. A tenant's
    requests with a lower ``priority`` (default 0) are served earlier.
    ``metadata`` is noted in its row of analytics, as that of chat completions is.
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
    """``POST /pooling``: the embedding of each input, or what ``POST /classify`` tells as
    ``probs``, by the model."""

    task: Literal["embed", "classify"] | None = None
    use_activation: bool | None = None


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

    @classmethod
    def of(cls, num_tokens: int) -> EmbeddingUsage:
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the inputs."""

    data: tuple[EmbeddingObject, ...]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class PoolingObject(msgspec.Struct, frozen=True, kw_only=True):
    """As ``EmbeddingObject``."""

    index: int
    data: msgspec.Raw
    object: str = "pooling"


class PoolingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the inputs."""

    id: str
    created: int
    data: tuple[PoolingObject, ...]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /classify``, as vLLM's servers have it. ``input`` is as that of embeddings. The
    probabilities are before any activation if ``use_activation`` is false."""

    model: str
    input: str | tuple[str | int | tuple[int, ...], ...]
    user: str | None = None
    metadata: dict[str, str] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    use_activation: bool | None = None


class ClassifiedText(msgspec.Struct, frozen=True, kw_only=True):
    """Of input ``index``: the likeliest label, and the probability of each."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int


class ClassifyList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: tuple[ClassifiedText, ...]
    usage: EmbeddingUsage
    object: str = "list"


class _Scoring(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cross-encoder reads two texts at once, and its number is a score after its activation,
    unless ``use_activation`` is false. Another model's texts are compared by the cosine of their
    embeddings, with the model's own ``pooling`` unless one is named.

    The first ``max_tokens_per_doc`` tokens of each document are read (``max_doc_length`` is another
    name), and the first ``max_query_length`` of each query. A text that does not fit the context
    window is cut at its end with ``truncate`` true or ``END``, refused with false or ``NONE``. If
    ``truncate`` is left out, it is refused, or cut with a notice where documents have a limit."""

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
    """``POST /v1/score``: how relevant the second texts are to the first, or how like them, pair by
    pair; a single first text goes with each second one. ``queries`` and ``documents`` are other
    names of ``text_1`` and ``text_2``."""

    text_1: str | tuple[str, ...] | None = None
    text_2: str | tuple[str, ...] | None = None
    queries: str | tuple[str, ...] | None = None
    documents: str | tuple[str, ...] | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of pair ``index``: a cosine between -1 and 1, or what a cross-encoder says."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: tuple[Score, ...]
    usage: EmbeddingUsage
    object: str = "list"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class RerankRequest(_Scoring, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``, as Jina's and Cohere's APIs and vLLM's servers have it. The best
    ``top_n`` documents are given out (0 or nothing: all), with their texts unless
    ``return_documents`` is false. A document is a text or an object. The text of an object is its
    ``text``, or the fields that ``rank_fields`` names: the value of one field, or several fields
    as YAML. ``max_chunks_per_doc`` changes nothing: each document is read as one chunk."""

    query: str
    documents: tuple[str | dict[str, Any], ...]
    rank_fields: tuple[str, ...] | None = None
    max_chunks_per_doc: int | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class RankTextsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/rerank`` of Text Embeddings Inference, which has ``texts`` in place of
    ``documents`` and names no model. Without ``model`` the only cross-encoder answers, or the only
    model. Scores are told before the activation if ``raw_scores``, and with their texts if
    ``return_text``. A text that does not fit the context window is cut at its end if ``truncate``,
    else refused."""

    query: str
    texts: tuple[str, ...]
    model: str | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TextRank(msgspec.Struct, frozen=True, kw_only=True):
    """The score of text ``index``, as Text Embeddings Inference tells it. The answer is a list of
    these, the most relevant text first."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document ``index`` of the request; the score is a cosine between -1 and 1, or what a
    cross-encoder says. ``document`` is an object of the request as it was given, or has a text of
    the request as ``text``."""

    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class RerankList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, the most relevant document first."""

    id: str
    model: str
    results: tuple[RankedDocument, ...]
    usage: EmbeddingUsage
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)
