"""Endpoints ``POST /v1/rerank`` and ``/v1/score``: pairs of texts, scored by a cross-encoder or by
the cosine of their embeddings.

A rerank may be in the form of Text Embeddings Inference: ``texts`` in, a list of scores out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import yaml
from msgspec.structs import replace

from millrace.gateway.api.pooled.pooled import (
    AnswerHead,
    PooledAsk,
    PooledEndpoint,
    PooledPlan,
)
from millrace.gateway.core import Gateway
from millrace.gateway.models import ServedModelLike
from millrace.gateway.rendering.embedding_vectors import numbers_of
from millrace.gateway.request.embedding_jobs import (
    Input,
    Overflow,
    embedding_pooling,
    inputs_in,
    truncation,
)
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.registry.requests.decoding import decode
from millrace.registry.similarity import Vector, cosine
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import (
    RankedDocument,
    RankTextsRequest,
    RerankList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextRank,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import field_of
from millrace.schemas.pooling import Pooling

# This endpoint's field name, then the names of other servers.
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
_DECODER = msgspec.json.Decoder(RankTextsRequest)


def scoring_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    rerank = msgspec.json.Decoder(RerankRequest)

    def read_rerank(body: bytes) -> PooledAsk:
        if has_texts(body):
            return rank_texts(body, partial(_rerank, field="texts"))
        return _rerank(decode(rerank, body))

    score = msgspec.json.Decoder(ScoreRequest)
    return [
        PooledEndpoint(gateway, RERANK_PATHS, "rerank", Api.RERANK, read_rerank),
        PooledEndpoint(
            gateway, SCORE_PATHS, "score", Api.SCORE, lambda body: _score(decode(score, body))
        ),
    ]


class _Scorer(NamedTuple):
    """Scoring method: ``of_input`` converts the pooled values of an input, ``scores`` computes the
    score of each pair.
    """

    of_input: Callable[[bytes], Any]
    scores: Callable[[Sequence[Any]], list[float]]


def _cosines(num_first: int) -> _Scorer:
    """Return a scorer that compares the embeddings of ``num_first`` texts with the embeddings of
    the texts after them.
    """

    def scores(made: Sequence[Vector]) -> list[float]:
        first, second = made[:num_first], made[num_first:]
        if len(first) == 1:
            first = [first[0]] * len(second)
        return list(map(cosine, first, second))

    return _Scorer(Vector.of, scores)


def _relevances(activation: Activation) -> _Scorer:
    """Return a scorer for the relevance that a cross-encoder computes for each pair."""
    return _Scorer(lambda pooled: activated(numbers_of(pooled), activation)[0], list)


def _rerank(asked: RerankRequest, field: str = "documents") -> PooledAsk:
    """Build the ask of a rerank. ``field`` is the caller's name of the documents."""
    if asked.top_n is not None and asked.top_n < 0:
        raise ParameterError("top_n", f"top_n must not be negative, got {asked.top_n}")
    _at_least_1(asked, "max_chunks_per_doc")
    if asked.rank_fields is not None and not asked.rank_fields:
        raise ParameterError("rank_fields", "rank_fields must name at least one field.")
    texts = [_text_of(asked, f"{field}[{i}]", one) for i, one in enumerate(asked.documents)]
    query, documents = Input(asked.query, "query"), inputs_in(field, texts)
    return _ask_of(asked, [query], documents, partial(_reranked, asked))


def _reranked(asked: RerankRequest, scores: list[float], head: AnswerHead) -> RerankList:
    # Sorting is stable: documents with equal scores keep the request's order.
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n or None]
    with_texts = asked.return_documents is not False
    return RerankList(
        id=head.request_id,
        model=asked.model,
        results=tuple(
            RankedDocument(
                index=i,
                relevance_score=scores[i],
                document=_as_object(asked.documents[i]) if with_texts else msgspec.UNSET,
            )
            for i in best
        ),
        usage=head.usage,
        notices=field_of(head.notices),
    )


def _scored(model: str, scores: list[float], head: AnswerHead) -> ScoreList:
    return ScoreList(
        id=head.request_id,
        created=head.created_s,
        model=model,
        data=tuple(Score(index=i, score=score) for i, score in enumerate(scores)),
        usage=head.usage,
        notices=field_of(head.notices),
    )


def _as_object(document: str | dict[str, Any]) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document


def _text_of(asked: RerankRequest, where: str, document: str | dict[str, Any]) -> str:
    """Return the text of a document. Raises ParameterError for an object without a text."""
    if isinstance(document, str):
        return document
    names = asked.rank_fields or ("text",)
    ranked = {name: document[name] for name in names if document.get(name) is not None}
    if not ranked:
        raise ParameterError(
            where,
            f"{where} must be a text or an object with one of the fields {', '.join(names)}; "
            f"it has {', '.join(document) or 'none'}.",
        )
    (value,) = ranked.values() if len(ranked) == 1 else (ranked,)
    if isinstance(value, str):
        return value
    if len(names) == 1 and names[0] == "text":
        raise ParameterError(f"{where}.text", f"{where}.text must be text.")
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=math.inf)


def _at_least_1(asked: RerankRequest | ScoreRequest, name: str) -> int | None:
    """Return the value of a limit. Raises ParameterError for a value below 1."""
    limit: int | None = getattr(asked, name)
    if limit is not None and limit < 1:
        raise ParameterError(name, f"{name} must be at least 1, got {limit}")
    return limit


def _score(asked: ScoreRequest) -> PooledAsk:
    first = _texts(asked, "text_1", "queries")
    second = _texts(asked, "text_2", "documents")
    if len(first) not in (1, len(second)):
        name, other = (one[0].where.partition("[")[0] for one in (first, second))
        raise ParameterError(
            name,
            f"{name} must be one text or as many as {other} has, "
            f"got {len(first)} and {len(second)}",
        )
    return _ask_of(asked, first, second, partial(_scored, asked.model))


def _texts(asked: ScoreRequest, name: str, other: str) -> list[Input]:
    given = {key: getattr(asked, key) for key in (name, other) if getattr(asked, key) is not None}
    if len(given) != 1:
        raise ParameterError(name, f"Give exactly one of {name} and {other}.")
    ((param, texts),) = given.items()
    return [Input(texts, param)] if isinstance(texts, str) else inputs_in(param, texts)


def _ask_of(
    asked: RerankRequest | ScoreRequest,
    first: list[Input],
    second: list[Input],
    answer: Callable[[list[float], AnswerHead], object],
) -> PooledAsk:
    first, second, num_kept = _limited(asked, first, second)

    def plan(model: ServedModelLike) -> PooledPlan:
        head = model.classifier
        if head is None:
            if asked.use_activation is False:
                raise ParameterError(
                    "use_activation", "use_activation: false goes with a cross-encoder only."
                )
            pooling = embedding_pooling(asked.pooling, model)
            return planned([*first, *second], pooling, _cosines(len(first)))
        _check_scores_pairs(asked, head)
        many = first * len(second) if len(first) == 1 else first
        pairs = [one._replace(pair=other) for one, other in zip(many, second, strict=True)]
        activation = Activation.NONE if asked.use_activation is False else head.score_activation
        return planned(pairs, Pooling.CLASSIFY, _relevances(activation))

    def planned(inputs: list[Input], pooling: Pooling, scorer: _Scorer) -> PooledPlan:
        return PooledPlan(
            inputs,
            pooling,
            scorer.of_input,
            lambda made, head: answer(scorer.scores(made), head),
        )

    return PooledAsk.of(asked, plan, num_kept)


def _limited(
    asked: RerankRequest | ScoreRequest, first: list[Input], second: list[Input]
) -> tuple[list[Input], list[Input], int | None]:
    """Return both texts with the limits of queries and documents, and ``truncate_prompt_tokens`` of
    their jobs. Raises ParameterError.
    """
    if asked.truncate == "START":
        raise ParameterError(
            "truncate", "truncate: texts are cut at their end here; give END or NONE."
        )
    overflow, num_kept = truncation(asked.truncate, asked.truncate_prompt_tokens)
    for_query = _at_least_1(asked, "max_query_length")
    limits = [_at_least_1(asked, name) for name in ("max_tokens_per_doc", "max_doc_length")]
    for_document = min((limit for limit in limits if limit is not None), default=None)
    of_document = overflow
    if for_document is not None and asked.truncate is None and num_kept is None:
        of_document = Overflow.CUT_WITH_NOTICE
    return (
        [one._replace(max_tokens=for_query, overflow=overflow) for one in first],
        [one._replace(max_tokens=for_document, overflow=of_document) for one in second],
        num_kept,
    )


def _check_scores_pairs(asked: RerankRequest | ScoreRequest, head: ClassifierHead) -> None:
    if not head.scores_pairs:
        raise ParameterError(
            "model",
            f"This model returns {len(head.labels)} labels of a text, not the relevance of a pair: "
            "use /classify.",
        )
    if asked.pooling is not None:
        raise ParameterError("pooling", "pooling applies to embeddings, not to cross-encoders.")


class _Texts(msgspec.Struct):
    """Field that identifies a body in this form."""

    texts: msgspec.Raw = msgspec.Raw(b"")


def _ranks(asked: RankTextsRequest, ranked: RerankList) -> tuple[TextRank, ...]:
    """Return the answer of a rerank in the form of Text Embeddings Inference."""
    texts = asked.texts if asked.return_text else ()
    return tuple(
        TextRank(
            index=one.index,
            score=one.relevance_score,
            text=texts[one.index] if texts else msgspec.UNSET,
        )
        for one in ranked.results
    )


def has_texts(body: bytes) -> bool:
    """Return whether a body is in this form."""
    try:
        return bool(msgspec.json.decode(body, type=_Texts).texts)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


def rank_texts(body: bytes, rerank: Callable[[RerankRequest], PooledAsk]) -> PooledAsk:
    """Read a body in this form; ``rerank`` makes an ask of a rerank. Raises MillraceError."""
    asked = decode(_DECODER, body)
    if asked.truncate and asked.truncation_direction in ("Left", "left"):
        raise ParameterError(
            "truncation_direction",
            "truncation_direction: texts are cut at their end here; give Right.",
        )
    request = RerankRequest(
        model=asked.model or "",
        query=asked.query,
        documents=asked.texts,
        truncate=asked.truncate,
        return_documents=False,
        use_activation=False if asked.raw_scores else None,
    )

    def plan(model: ServedModelLike) -> PooledPlan:
        # The cosine of two embeddings has no activation.
        by_model = request if model.classifier else replace(request, use_activation=None)
        planned = rerank(by_model).plan(model)
        return planned._replace(
            whole=lambda made, head: _ranks(asked, cast("RerankList", planned.whole(made, head)))
        )

    return replace(rerank(request), model=asked.model, plan=plan)
