"""From a request for embeddings to its jobs, one for each input."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from millrace.gateway.models import ServedModelLike
from millrace.gateway.rendering.embedding_vectors import VectorForm
from millrace.registry.checkpoints.classifier import ClassifierHead
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.embeddings import MAX_INPUTS, EmbeddingRequest
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS, Job
from millrace.schemas.pooling import EmbeddingPooling, Pooling

_PAIR_FIELD = "text_pair"


class Input(NamedTuple):
    """A text, or token ids, to be read: ``where`` it stands in the field ``param``; with ``pair``
    another text that is read with it."""

    given: str | tuple[int, ...]
    param: str
    where: str
    pair: Input | None = None


def inputs_of(given: str | Sequence[str | int | tuple[int, ...]]) -> list[Input]:
    """The texts and token ids of a field ``input``. Raises ParameterError."""
    if isinstance(given, str):
        return [Input(given, "input", "input")]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [Input(cast("tuple[int, ...]", given), "input", "input")]
    if kinds and kinds not in ({str}, {tuple}):
        raise ParameterError(
            "input", "input must be texts, token ids or lists of token ids, not mixed"
        )
    return inputs_in("input", cast("tuple[str | tuple[int, ...], ...]", given))


def inputs_in(param: str, given: Sequence[str | tuple[int, ...]]) -> list[Input]:
    """Those of a field that is a list. Raises ParameterError."""
    if not given:
        raise ParameterError(param, f"{param} must not be empty")
    if len(given) > MAX_INPUTS:
        raise ParameterError(param, f"{param} takes at most {MAX_INPUTS} items, got {len(given)}")
    if len(given) == 1:
        return [Input(given[0], param, param)]
    return [Input(one, param, f"{param}[{i}]") for i, one in enumerate(given)]


async def jobs_of(
    base: Job, inputs: Sequence[Input], model: ServedModelLike, prompts: PromptPool
) -> list[Job]:
    """A job like ``base`` for each input. Raises MillraceError, naming the input at fault."""

    def prepare_all() -> list[Job]:
        # Nothing is drawn for an embedding, so any seed will do.
        seeds = random.Random(base.request_id)
        return [
            _prepare(base, index, one, model=model, seeds=seeds) for index, one in enumerate(inputs)
        ]

    num_units = sum(len(one.given) + len(one.pair.given if one.pair else ()) for one in inputs)
    return await prompts.run(base.tenant, num_units, prepare_all)


def embedding_pooling(given: EmbeddingPooling | None, model: ServedModelLike) -> Pooling:
    """How embeddings are made; by the model if it was not ``given``. Raises ParameterError for a
    model that makes none."""
    if model.classifier is not None:
        raise ParameterError(
            "model",
            "This model makes no embeddings, but "
            + (
                "scores of pairs of texts: ask /v1/rerank or /v1/score."
                if model.classifier.scores_pairs
                else "labels of texts: ask /classify."
            ),
        )
    return model.embedding_defaults.pooling if given is None else Pooling(given)


def classifier_of(model: ServedModelLike) -> ClassifierHead:
    """Raises ParameterError for a model that makes no labels."""
    if model.classifier is None:
        raise ParameterError("model", "This model has no classification head: it makes no labels.")
    return model.classifier


def form_of(asked: EmbeddingRequest, model: ServedModelLike) -> VectorForm:
    """How the vectors are given out. Raises ParameterError."""
    dimensions, size = asked.dimensions, model.embedding_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise ParameterError(
            "dimensions", f"dimensions must be between 1 and {size}, got {dimensions}"
        )
    normalize = asked.normalize
    if normalize is None:
        normalize = model.embedding_defaults.normalize
    return VectorForm(dimensions, normalize, asked.encoding_format == "base64")


def user_of(given: str | None) -> str:
    """Raises ParameterError for a name that is too long."""
    user = given or ""
    if len(user) > MAX_LABEL_CHARACTERS:
        raise ParameterError("user", f"user must have at most {MAX_LABEL_CHARACTERS} characters")
    return user


def _prepare(
    base: Job,
    index: int,
    one: Input,
    *,
    model: ServedModelLike,
    seeds: random.Random,
) -> Job:
    given, pair = one.given, one.pair
    for part in (one,) if pair is None else (one, pair):
        if not part.given:
            raise ParameterError(part.where, f"{part.where} must not be empty")
    text, token_ids = (given, None) if isinstance(given, str) else (None, given)
    request_id = f"{base.request_id}.{index}" if index else base.request_id
    job = msgspec.structs.replace(
        base,
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        text_pair=None if pair is None else str(pair.given),
    )
    try:
        return model.prepare(job, seeds)
    except ParameterError as error:
        fields = {"prompt": one, "prompt_token_ids": one, _PAIR_FIELD: pair}
        field = error.param.partition("[")[0]
        at_fault = fields.get(field)
        if at_fault is None:
            raise
        param, message = (
            text.replace(field, at_fault.where, 1) for text in (error.param, error.message)
        )
        raise ParameterError(param, message) from error
