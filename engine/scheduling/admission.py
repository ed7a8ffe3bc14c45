"""Admission checks of requests, and the errors of refused ones."""

from __future__ import annotations

from millrace.engine.types import EngineRequest
from millrace.schemas.errors import (
    AdapterError,
    ContextLengthError,
    KVCapacityError,
    ParameterError,
)
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling


def check_kind(request: EngineRequest, *, has_head: bool, has_labels: bool) -> None:
    """Raise ParameterError for a request that the checkpoint's heads cannot serve.

    Tokens need a language-model head and labels need a classification head. Parameters that only
    completions have raise it for an embedding or labels, too.
    """
    if request.pooling is None:
        if not has_head:
            kind = "labels" if has_labels else "embeddings"
            raise ParameterError(
                "model", f"This model makes {kind} only: it has no language-model head."
            )
        return
    if request.pooling is Pooling.CLASSIFY and not has_labels:
        raise ParameterError(
            "pooling", "This model has no classification head: it makes no labels."
        )
    for name, given in (
        ("n", request.sampling.n > 1),
        ("grammar", request.sampling.grammar is not None),
        ("prompt_logprobs", request.sampling.prompt_logprobs is not None),
        ("output_token_ids", bool(request.output_token_ids)),
    ):
        if given:
            raise ParameterError(
                name, f"A request for an embedding or labels takes no {name}; leave it out."
            )


def check_adapter(request: EngineRequest, *, max_adapters: int) -> None:
    """Raise AdapterError for a request with an adapter if the engine has no adapter slots."""
    if request.adapter is not None and not max_adapters:
        raise AdapterError(
            f"This worker has no slot for adapter {request.adapter.name}; set engine.max_adapters "
            "(default 0 on a GPU)."
        )


def longest_total_tokens(
    request: EngineRequest, *, vocab_size: int, context_window_tokens: int, capacity_tokens: int
) -> int:
    """Return the maximum length of each choice of the request, prompt included; for an embedding
    the prompt's length.

    Choices need not be in the KV cache together, so a request fits if one of them does. Raises
    ParameterError, ContextLengthError or KVCapacityError.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise ParameterError("prompt_token_ids", "The prompt has no tokens; send at least one.")
    _check_token_ids(request.prompt_token_ids, vocab_size)
    if request.output_token_ids:
        _check_token_ids(request.output_token_ids, vocab_size)
        if request.sampling.n > 1:
            raise ParameterError(
                "n", "Only a request for one completion can be resumed; n must be 1."
            )
    max_tokens = 0 if request.pooling is not None else request.sampling.max_tokens
    if num_prompt_tokens + (1 if max_tokens is None else max_tokens) > context_window_tokens:
        raise ContextLengthError(num_prompt_tokens, max_tokens, context_window_tokens)
    if max_tokens is None:
        longest = min(context_window_tokens, capacity_tokens)
        max_tokens = max(1, longest - num_prompt_tokens)
    if num_prompt_tokens + max_tokens > capacity_tokens:
        raise KVCapacityError(num_prompt_tokens, max_tokens, capacity_tokens)
    return num_prompt_tokens + max_tokens


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    bad = next(token for token in token_ids if not 0 <= token < vocab_size)
    raise ParameterError(
        "prompt_token_ids", f"Token id {bad} is not in the vocabulary of {vocab_size} tokens."
    )


def finished_before(request: EngineRequest, max_total_tokens: int) -> FinishReason | None:
    """Return why a resumed request is already complete; None if it is not."""
    if not request.output_token_ids:
        return None
    last = request.output_token_ids[-1]
    sampling = request.sampling
    if last in sampling.stop_token_ids:
        return FinishReason.STOP
    if last in request.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP
    if len(request.prompt_token_ids) + len(request.output_token_ids) >= max_total_tokens:
        return FinishReason.LENGTH
    return None
