"""Endpoints ``POST /v1/embeddings``, and ``/pooling`` and ``/classify`` as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from millrace.gateway.api.pooled.pooled import (
    AnswerHead,
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
)
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.registry.requests.decoding import decode
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
# Fields of embeddings only.
_OF_EMBEDDINGS = ("dimensions", "normalize", "pooling")
CLASSIFY_ROUTE = "/classify"


def embedding_endpoints(gateway: Gateway) -> list[PooledEndpoint]:
    embeddings = msgspec.json.Decoder(EmbeddingRequest)
    pooling = msgspec.json.Decoder(PoolingRequest)
    classify = msgspec.json.Decoder(ClassifyRequest)
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
        PooledEndpoint(
            gateway,
            (CLASSIFY_ROUTE,),
            "classify",
            Api.CLASSIFY,
            lambda body: _classify(decode(classify, body)),
        ),
    ]


def _embed(asked: EmbeddingRequest) -> PooledAsk:
    inputs, num_kept = truncated_inputs(asked)

    def plan(model: ServedModelLike) -> PooledPlan:
        pooling = embedding_pooling(asked.pooling, model)
        return PooledPlan(inputs, pooling, form_of(asked, model).encode, whole)

    def whole(made: Sequence[msgspec.Raw], head: AnswerHead) -> EmbeddingList:
        return EmbeddingList(
            data=tuple(EmbeddingObject(index=i, embedding=one) for i, one in enumerate(made)),
            model=asked.model,
            usage=head.usage,
        )

    return PooledAsk.of(asked, plan, num_kept)


def _pool(asked: PoolingRequest) -> PooledAsk:
    inputs, num_kept = truncated_inputs(asked)

    def plan(model: ServedModelLike) -> PooledPlan:
        if asked.task == "classify" or (asked.task is None and model.classifier is not None):
            return PooledPlan(inputs, Pooling.CLASSIFY, _labels(asked, model), whole)
        pooling = embedding_pooling(asked.pooling, model)
        if asked.use_activation is not None:
            raise ParameterError(
                "use_activation", "use_activation applies to labels; use normalize."
            )
        return PooledPlan(inputs, pooling, form_of(asked, model).encode, whole)

    def whole(made: Sequence[msgspec.Raw], head: AnswerHead) -> PoolingList:
        return PoolingList(
            id=head.request_id,
            created=head.created_s,
            data=tuple(PoolingObject(index=i, data=one) for i, one in enumerate(made)),
            model=asked.model,
            usage=head.usage,
        )

    return PooledAsk.of(asked, plan, num_kept)


def _labels(asked: PoolingRequest, model: ServedModelLike) -> Callable[[bytes], msgspec.Raw]:
    head = classifier_of(model)
    for name in _OF_EMBEDDINGS:
        if getattr(asked, name) is not None:
            raise ParameterError(name, f"{name} applies to embeddings; this model makes labels.")
    activation = class_activation(head, asked.use_activation)
    form = VectorForm(None, False, asked.encoding_format == "base64")
    return lambda pooled: form.encode_numbers(activated(numbers_of(pooled), activation))


def class_activation(head: ClassifierHead, use_activation: bool | None) -> Activation:
    """Return the activation that is applied to the logits of a text's labels."""
    return Activation.NONE if use_activation is False else head.class_activation


def _classify(asked: ClassifyRequest) -> PooledAsk:
    inputs = inputs_of(asked.input)

    def plan(model: ServedModelLike) -> PooledPlan:
        head = classifier_of(model)
        activation = class_activation(head, asked.use_activation)

        def whole(made: Sequence[list[float]], answer: AnswerHead) -> ClassifyList:
            texts = (
                ClassifiedText(
                    index=index,
                    label=head.labels[numbers.index(max(numbers))],
                    probs=tuple(numbers),
                    num_classes=len(numbers),
                )
                for index, numbers in enumerate(made)
            )
            return ClassifyList(
                id=answer.request_id,
                created=answer.created_s,
                model=asked.model,
                data=tuple(texts),
                usage=answer.usage,
            )

        return PooledPlan(
            inputs,
            Pooling.CLASSIFY,
            lambda pooled: activated(numbers_of(pooled), activation),
            whole,
        )

    return PooledAsk.of(asked, plan, asked.truncate_prompt_tokens)
