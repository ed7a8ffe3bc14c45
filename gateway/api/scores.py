"""``POST /v1/rerank`` and ``/v1/score``: texts compared by their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.api.pooled import AnswerHead, PooledAnswer, PooledAsk, PooledEndpoint
from gateway.core import Gateway
from gateway.rendering.embedding_jobs import Input, inputs_in, user_of
from gateway.rendering.similarity import Vector, cosine
from gateway.request.message_fields import priority_of
from gateway.request.parsing import decode
from schemas.embeddings import (
    RerankedText,
    RerankList,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from schemas.errors import ParameterError

# By the name that the endpoint has here, then by those of other servers.
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")


def scoring_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    rerank = msgspec.json.Decoder(RerankRequest)
    score = msgspec.json.Decoder(ScoreRequest)
    return [
        PooledEndpoint(gateway, RERANK_PATHS, "rerank", lambda body: _rerank(decode(rerank, body))),
        PooledEndpoint(gateway, SCORE_PATHS, "score", lambda body: _score(decode(score, body))),
    ]


class _Compared(PooledAnswer[Vector]):
    def of_input(self, pooled: bytes) -> Vector:
        return Vector.of(pooled)


class _Reranked(_Compared):
    """Of the query's embedding and those of the documents."""

    def __init__(self, asked: RerankRequest, texts: Sequence[str]) -> None:
        self._asked = asked
        self._texts = texts

    def whole(self, made: Sequence[Vector], head: AnswerHead) -> RerankList:
        asked = self._asked
        query, *documents = made
        scores = [cosine(query, document) for document in documents]
        # Of equals the one that was given first: the order is the same whenever it is asked for.
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n or None]
        with_texts = asked.return_documents is not False
        return RerankList(
            id=head.request_id,
            model=asked.model,
            results=tuple(
                RerankResult(
                    index=i,
                    relevance_score=scores[i],
                    document=RerankedText(text=self._texts[i]) if with_texts else msgspec.UNSET,
                )
                for i in best
            ),
            usage=head.usage,
        )


class _Scored(_Compared):
    """Of the embeddings of ``num_first`` texts and of those that they are compared with."""

    def __init__(self, model: str, num_first: int) -> None:
        self._model = model
        self._num_first = num_first

    def whole(self, made: Sequence[Vector], head: AnswerHead) -> ScoreList:
        first, second = made[: self._num_first], made[self._num_first :]
        if len(first) == 1:
            first = [first[0]] * len(second)
        scores = map(cosine, first, second)
        return ScoreList(
            id=head.request_id,
            created=head.created_s,
            model=self._model,
            data=tuple(Score(index=i, score=score) for i, score in enumerate(scores)),
            usage=head.usage,
        )


def _rerank(asked: RerankRequest) -> PooledAsk:
    if asked.top_n is not None and asked.top_n < 0:
        raise ParameterError("top_n", f"top_n must not be negative, got {asked.top_n}")
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    inputs = [Input(asked.query, "query", "query"), *inputs_in("documents", texts)]
    return _ask_of(asked, inputs, _Reranked(asked, texts))


def _score(asked: ScoreRequest) -> PooledAsk:
    first = _texts(asked, "text_1", "queries")
    second = _texts(asked, "text_2", "documents")
    if len(first) not in (1, len(second)):
        raise ParameterError(
            first[0].param,
            f"{first[0].param} must be one text or as many as {second[0].param} has, "
            f"got {len(first)} and {len(second)}",
        )
    return _ask_of(asked, [*first, *second], _Scored(asked.model, len(first)))


def _texts(asked: ScoreRequest, name: str, other: str) -> list[Input]:
    given = {key: getattr(asked, key) for key in (name, other) if getattr(asked, key) is not None}
    if len(given) != 1:
        raise ParameterError(name, f"Give exactly one of {name} and {other}.")
    ((param, texts),) = given.items()
    return inputs_in(param, (texts,) if isinstance(texts, str) else texts)


def _ask_of(
    asked: RerankRequest | ScoreRequest, inputs: list[Input], answer: _Compared
) -> PooledAsk:
    return PooledAsk(
        model=asked.model,
        inputs=inputs,
        answer=lambda _model: answer,
        user=user_of(asked.user),
        pooling=asked.pooling,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        priority=priority_of(asked.priority),
    )
