"""``POST /v1/embeddings``, and ``/pooling`` as vLLM's servers have it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence

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
from millrace.gateway.rendering.embedding_vectors import VectorForm, form_of, numbers_of
from millrace.gateway.request.embedding_jobs import (
    classifier_of,
    embedding_pooling,
    inputs_of,
    truncated_inputs,
    user_of,
)
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.message_fields import metadata_of, priority_of
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import (
    ClassifiedText,
    ClassifyList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    PoolingList,
    PoolingObject,
    PoolingRequest,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.pooling import Pooling

ROUTE = "/v1/embeddings"
POOLING_ROUTE = "/pooling"
# Fields that only embeddings have.
_OF_EMBEDDINGS = ("dimensions", "normalize", "pooling")
CLASSIFY_ROUTE = "/classify"


def embedding_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    embeddings = msgspec.json.Decoder(EmbeddingRequest)
    pooling = msgspec.json.Decoder(PoolingRequest)
    return [
        PooledEndpoint(
            gateway, (ROUTE,), "embd", Api.EMBEDDINGS, lambda body: _embed(decode(embeddings, body))
        ),
        PooledEndpoint(
            gateway,
            (POOLING_ROUTE,),
            "pool",
            Api.POOLING,
            lambda body: _pool(decode(pooling, body)),
        ),
    ]


class _Vectors(PooledAnswer[msgspec.Raw], ABC):
    """Each input's numbers as ``encode`` gives them out."""

    def __init__(self, model: str, encode: Callable[[bytes], msgspec.Raw]) -> None:
        self._model = model
        self._encode = encode

    def of_input(self, pooled: bytes) -> msgspec.Raw:
        return self._encode(pooled)


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


def _embed(asked: EmbeddingRequest) -> PooledAsk:
    inputs, num_kept = truncated_inputs(asked)

    def plan(model: ServedModelLike) -> PooledPlan:
        pooling = embedding_pooling(asked.pooling, model)
        return PooledPlan(inputs, pooling, _Embeddings(asked.model, form_of(asked, model).encode))

    return _ask_of(asked, num_kept, plan)


def _pool(asked: PoolingRequest) -> PooledAsk:
    inputs, num_kept = truncated_inputs(asked)

    def plan(model: ServedModelLike) -> PooledPlan:
        if asked.task == "classify" or (asked.task is None and model.classifier is not None):
            return PooledPlan(inputs, Pooling.CLASSIFY, _Pooled(asked.model, _labels(asked, model)))
        pooling = embedding_pooling(asked.pooling, model)
        if asked.use_activation is not None:
            raise ParameterError(
                "use_activation", "use_activation goes with labels; see normalize."
            )
        return PooledPlan(inputs, pooling, _Pooled(asked.model, form_of(asked, model).encode))

    return _ask_of(asked, num_kept, plan)


def _labels(asked: PoolingRequest, model: ServedModelLike) -> Callable[[bytes], msgspec.Raw]:
    head = classifier_of(model)
    for name in _OF_EMBEDDINGS:
        if getattr(asked, name) is not None:
            raise ParameterError(name, f"{name} goes with embeddings, and this model makes labels.")
    activation = class_activation(head, asked.use_activation)
    form = VectorForm(None, False, asked.encoding_format == "base64")
    return lambda pooled: form.encode_numbers(activated(numbers_of(pooled), activation))


def _ask_of(
    asked: EmbeddingRequest, num_kept: int | None, plan: Callable[[ServedModelLike], PooledPlan]
) -> PooledAsk:
    return PooledAsk(
        model=asked.model,
        plan=plan,
        user=user_of(asked.user),
        truncate_prompt_tokens=num_kept,
        priority=priority_of(asked.priority),
        metadata=metadata_of(asked.metadata),
    )


def classify_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    decoder = msgspec.json.Decoder(ClassifyRequest)
    return [
        PooledEndpoint(
            gateway,
            (CLASSIFY_ROUTE,),
            "classify",
            Api.CLASSIFY,
            lambda body: _classify(decode(decoder, body)),
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


def _classify(asked: ClassifyRequest) -> PooledAsk:
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
