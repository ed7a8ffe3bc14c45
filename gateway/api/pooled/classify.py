"""``POST /classify``, as vLLM's servers have it: texts and their labels."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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
from millrace.gateway.request.embedding_jobs import classifier_of, inputs_of, user_of
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.message_fields import metadata_of, priority_of
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import ClassifiedText, ClassifyList, ClassifyRequest
from millrace.schemas.pooling import Pooling

ROUTE = "/classify"


def classify_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    decoder = msgspec.json.Decoder(ClassifyRequest)
    return [
        PooledEndpoint(
            gateway, (ROUTE,), "classify", Api.CLASSIFY, lambda body: _ask(decode(decoder, body))
        )
    ]


def class_activation(head: ClassifierHead, use_activation: bool | None) -> Activation:
    """What the numbers of a text's labels go through."""
    return Activation.NONE if use_activation is False else head.class_activation


class _Classified(PooledAnswer[list[float]]):
    def __init__(self, asked: ClassifyRequest, head: ClassifierHead) -> None:
        self._model = asked.model
        self._labels = head.labels
        self._activation = class_activation(head, asked.use_activation)

    def of_input(self, pooled: bytes) -> list[float]:
        return activated(numbers_of(pooled), self._activation)

    def whole(self, made: Sequence[list[float]], head: AnswerHead) -> ClassifyList:
        return ClassifyList(
            id=head.request_id,
            created=head.created_s,
            model=self._model,
            data=tuple(self._text(index, numbers) for index, numbers in enumerate(made)),
            usage=head.usage,
        )

    def _text(self, index: int, numbers: list[float]) -> ClassifiedText:
        return ClassifiedText(
            index=index,
            label=self._labels[numbers.index(max(numbers))],
            probs=tuple(numbers),
            num_classes=len(numbers),
        )


def _ask(asked: ClassifyRequest) -> PooledAsk:
    inputs = inputs_of(asked.input)

    def plan(model: ServedModelLike) -> PooledPlan:
        return PooledPlan(inputs, Pooling.CLASSIFY, _Classified(asked, classifier_of(model)))

    return PooledAsk(
        model=asked.model,
        plan=plan,
        user=user_of(asked.user),
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        priority=priority_of(asked.priority),
        metadata=metadata_of(asked.metadata),
    )
