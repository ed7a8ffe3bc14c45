"""From a request for embeddings to its jobs, one for each input."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import msgspec

from gateway.models import ServedModelLike
from gateway.rendering.embedding_vectors import VectorForm
from registry.tokenizers.prompt_pool import PromptPool
from schemas.embeddings import MAX_INPUTS, EmbeddingRequest
from schemas.errors import ParameterError
from schemas.jobs import MAX_LABEL_CHARACTERS, Job

_PROMPT_FIELDS = ("prompt", "prompt_token_ids")

Input = str | tuple[int, ...]


def inputs_of(asked: EmbeddingRequest) -> list[Input]:
    """The texts and token ids to embed. Raises ParameterError."""
    given = asked.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise ParameterError("input", "input must not be empty")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast("tuple[int, ...]", given)]
    if len(given) > MAX_INPUTS:
        raise ParameterError("input", f"input takes at most {MAX_INPUTS} items, got {len(given)}")
    if kinds in ({str}, {tuple}):
        return list(cast("tuple[Input, ...]", given))
    raise ParameterError("input", "input must be texts, token ids or lists of token ids, not mixed")


async def jobs_of(
    base: Job, inputs: Sequence[Input], model: ServedModelLike, prompts: PromptPool
) -> list[Job]:
    """A job like ``base`` for each input. Raises MillraceError, naming the input at fault."""

    def prepare_all() -> list[Job]:
        # Nothing is drawn for an embedding, so any seed will do.
        seeds = random.Random(base.request_id)
        return [
            _prepare(base, index, one, is_list=len(inputs) > 1, model=model, seeds=seeds)
            for index, one in enumerate(inputs)
        ]

    return await prompts.run(base.tenant, sum(map(len, inputs)), prepare_all)


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


def user_of(asked: EmbeddingRequest) -> str:
    """Raises ParameterError for a name that is too long."""
    user = asked.user or ""
    if len(user) > MAX_LABEL_CHARACTERS:
        raise ParameterError("user", f"user must have at most {MAX_LABEL_CHARACTERS} characters")
    return user


def _prepare(
    base: Job,
    index: int,
    given: Input,
    *,
    is_list: bool,
    model: ServedModelLike,
    seeds: random.Random,
) -> Job:
    where = f"input[{index}]" if is_list else "input"
    if not given:
        raise ParameterError("input", f"{where} must not be empty")
    text, token_ids = (given, None) if isinstance(given, str) else (None, given)
    request_id = f"{base.request_id}.{index}" if index else base.request_id
    job = msgspec.structs.replace(
        base, request_id=request_id, prompt=text, prompt_token_ids=token_ids
    )
    try:
        return model.prepare(job, seeds)
    except ParameterError as error:
        if error.param not in _PROMPT_FIELDS:
            raise
        raise ParameterError("input", error.message.replace(error.param, where, 1)) from error
