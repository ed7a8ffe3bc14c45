"""``POST /v1/embeddings``, and ``/pooling`` as vLLM's servers have it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.api.pooled import AnswerHead, PooledAnswer, PooledAsk, PooledEndpoint
from gateway.core import Gateway
from gateway.models import ServedModelLike
from gateway.rendering.embedding_jobs import form_of, inputs_of, user_of
from gateway.rendering.embedding_vectors import VectorForm
from gateway.request.message_fields import priority_of
from gateway.request.parsing import decode
from schemas.embeddings import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    PoolingList,
    PoolingObject,
    PoolingRequest,
)

ROUTE = "/v1/embeddings"
POOLING_ROUTE = "/pooling"


def embedding_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    embeddings = msgspec.json.Decoder(EmbeddingRequest)
    pooling = msgspec.json.Decoder(PoolingRequest)
    return [
        PooledEndpoint(
            gateway, (ROUTE,), "embd", lambda body: _ask_of(decode(embeddings, body), _Embeddings)
        ),
        PooledEndpoint(
            gateway, (POOLING_ROUTE,), "pool", lambda body: _ask_of(decode(pooling, body), _Pooled)
        ),
    ]


class _Vectors(PooledAnswer[msgspec.Raw]):
    def __init__(self, asked: EmbeddingRequest, form: VectorForm) -> None:
        self._model = asked.model
        self._form = form

    def of_input(self, pooled: bytes) -> msgspec.Raw:
        return self._form.encode(pooled)


class _Embeddings(_Vectors):
    def whole(self, made: Sequence[msgspec.Raw], head: AnswerHead) -> EmbeddingList:
        return EmbeddingList(
            data=tuple(EmbeddingObject(index=i, embedding=one) for i, one in enumerate(made)),
            model=self._model,
            usage=head.usage,
        )


class _Pooled(_Vectors):
    def whole(self, made: Sequence[msgspec.Raw], head: AnswerHead) -> PoolingList:
        return PoolingList(
            id=head.request_id,
            created=head.created_s,
            data=tuple(PoolingObject(index=i, data=one) for i, one in enumerate(made)),
            model=self._model,
            usage=head.usage,
        )


def _ask_of(asked: EmbeddingRequest, kind: type[_Vectors]) -> PooledAsk:
    def answer(model: ServedModelLike) -> _Vectors:
        return kind(asked, form_of(asked, model))

    return PooledAsk(
        model=asked.model,
        inputs=inputs_of(asked),
        answer=answer,
        user=user_of(asked.user),
        pooling=asked.pooling,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        priority=priority_of(asked.priority),
    )
