"""``POST /v1/rerank`` and ``/v1/score``: pairs of texts, by a cross-encoder or by their
embeddings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from millrace.gateway.api.pooled.pooled import (
    AnswerHead,
    PooledAnswer,
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
    user_of,
)
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.message_fields import metadata_of, priority_of
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

_MadeT = TypeVar("_MadeT")

# By the name that the endpoint has here, then by those of other servers.
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


class _Scorer(ABC, Generic[_MadeT]):
    """How texts are compared."""

    @abstractmethod
    def of_input(self, pooled: bytes) -> _MadeT: ...

    @abstractmethod
    def scores(self, made: Sequence[_MadeT]) -> list[float]:
        """Of each pair, of what was made of all inputs."""


class _Cosines(_Scorer[Vector]):
    """Of the embeddings of ``num_first`` texts and of those that they are compared with."""

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first

    def of_input(self, pooled: bytes) -> Vector:
        return Vector.of(pooled)

    def scores(self, made: Sequence[Vector]) -> list[float]:
        first, second = made[: self._num_first], made[self._num_first :]
        if len(first) == 1:
            first = [first[0]] * len(second)
        return list(map(cosine, first, second))


class _Relevances(_Scorer[float]):
    """What a cross-encoder says of each pair."""

    def __init__(self, activation: Activation) -> None:
        self._activation = activation

    def of_input(self, pooled: bytes) -> float:
        return activated(numbers_of(pooled), self._activation)[0]

    def scores(self, made: Sequence[float]) -> list[float]:
        return list(made)


class _Scored(PooledAnswer[_MadeT], ABC):
    def __init__(self, scorer: _Scorer[_MadeT]) -> None:
        self._scorer = scorer

    def of_input(self, pooled: bytes) -> _MadeT:
        return self._scorer.of_input(pooled)


class _RerankAnswer(_Scored[_MadeT]):
    def __init__(self, asked: RerankRequest, scorer: _Scorer[_MadeT]) -> None:
        super().__init__(scorer)
        self._asked = asked

    def whole(self, made: Sequence[_MadeT], head: AnswerHead) -> RerankList:
        asked = self._asked
        scores = self._scorer.scores(made)
        # Of equals the one that was given first: the order is the same whenever it is asked for.
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


class _ScoreAnswer(_Scored[_MadeT]):
    def __init__(self, model: str, scorer: _Scorer[_MadeT]) -> None:
        super().__init__(scorer)
        self._model = model

    def whole(self, made: Sequence[_MadeT], head: AnswerHead) -> ScoreList:
        return ScoreList(
            id=head.request_id,
            created=head.created_s,
            model=self._model,
            data=tuple(
                Score(index=i, score=score) for i, score in enumerate(self._scorer.scores(made))
            ),
            usage=head.usage,
            notices=field_of(head.notices),
        )


def _rerank(asked: RerankRequest, field: str = "documents") -> PooledAsk:
    """``field`` is the caller's name of the documents."""
    if asked.top_n is not None and asked.top_n < 0:
        raise ParameterError("top_n", f"top_n must not be negative, got {asked.top_n}")
    _at_least_1(asked, "max_chunks_per_doc")
    if asked.rank_fields is not None and not asked.rank_fields:
        raise ParameterError("rank_fields", "rank_fields must name at least one field.")
    texts = [_text_of(asked, f"{field}[{i}]", one) for i, one in enumerate(asked.documents)]
    query, documents = Input(asked.query, "query"), inputs_in(field, texts)
    return _ask_of(asked, [query], documents, lambda scorer: _RerankAnswer(asked, scorer))


def _as_object(document: str | dict[str, Any]) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document


def _text_of(asked: RerankRequest, where: str, document: str | dict[str, Any]) -> str:
    """The text of a document. Raises ParameterError for an object without one."""
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
    """The value of a limit. Raises ParameterError for one below 1."""
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
    return _ask_of(asked, first, second, lambda scorer: _ScoreAnswer(asked.model, scorer))


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
    answer: Callable[[_Scorer[Any]], PooledAnswer[Any]],
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
            return PooledPlan([*first, *second], pooling, answer(_Cosines(len(first))))
        _check_scores_pairs(asked, head)
        many = first * len(second) if len(first) == 1 else first
        pairs = [one._replace(pair=other) for one, other in zip(many, second, strict=True)]
        activation = Activation.NONE if asked.use_activation is False else head.score_activation
        return PooledPlan(pairs, Pooling.CLASSIFY, answer(_Relevances(activation)))

    return PooledAsk(
        model=asked.model,
        plan=plan,
        user=user_of(asked.user),
        truncate_prompt_tokens=num_kept,
        priority=priority_of(asked.priority),
        metadata=metadata_of(asked.metadata),
    )


def _limited(
    asked: RerankRequest | ScoreRequest, first: list[Input], second: list[Input]
) -> tuple[list[Input], list[Input], int | None]:
    """Both texts with the limits of queries and documents, and ``truncate_prompt_tokens`` of their
    jobs. Raises ParameterError."""
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
            f"This model tells {len(head.labels)} labels of a text, not how relevant it is to "
            "another: ask /classify.",
        )
    if asked.pooling is not None:
        raise ParameterError("pooling", "pooling goes with embeddings, not with a cross-encoder.")


class _Texts(msgspec.Struct):
    """The field by which a body in this form is known."""

    texts: msgspec.Raw = msgspec.Raw(b"")


class _Ranks(PooledAnswer[Any]):
    """The answer of a rerank in this form."""

    def __init__(self, asked: RankTextsRequest, ranked: PooledAnswer[Any]) -> None:
        self._asked = asked
        self._ranked = ranked

    def of_input(self, pooled: bytes) -> Any:
        return self._ranked.of_input(pooled)

    def whole(self, made: Sequence[Any], head: AnswerHead) -> tuple[TextRank, ...]:
        ranked = self._ranked.whole(made, head)
        assert isinstance(ranked, RerankList)
        texts = self._asked.texts if self._asked.return_text else ()
        return tuple(
            TextRank(
                index=one.index,
                score=one.relevance_score,
                text=texts[one.index] if texts else msgspec.UNSET,
            )
            for one in ranked.results
        )


def has_texts(body: bytes) -> bool:
    """Whether a body is in this form."""
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
        return planned._replace(answer=_Ranks(asked, planned.answer))

    return replace(rerank(request), model=asked.model, plan=plan)
