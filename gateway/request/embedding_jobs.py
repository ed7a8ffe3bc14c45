"""Jobs of a request for embeddings, labels or scores: one for each input."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, cast

import msgspec

from millrace.gateway.models import ServedModelLike, TokenizerLike
from millrace.registry.checkpoints.classifier import ClassifierHead
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.embeddings import MAX_INPUTS, EmbeddingRequest, Truncate
from millrace.schemas.errors import ContextLengthError, ParameterError
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS, Job, RequestPart
from millrace.schemas.notices import NoticeCode, notice
from millrace.schemas.pooling import EmbeddingPooling, Pooling

_PAIR_FIELD = "text_pair"


class Overflow(Enum):
    """Treatment of an input that is longer than the model's context window."""

    REFUSED = auto()
    CUT = auto()  # at its end, as its client asks
    CUT_WITH_NOTICE = auto()


def truncation(truncate: Truncate | None, num_kept: int | None) -> tuple[Overflow, int | None]:
    """Return the treatment of long inputs, and ``truncate_prompt_tokens`` for their jobs. Raises
    ParameterError if two fields contradict each other.
    """
    if truncate in (None, False, "NONE"):
        return Overflow.REFUSED, num_kept
    if num_kept is not None:
        raise ParameterError("truncate", "Give one of truncate and truncate_prompt_tokens.")
    if truncate == "START":
        return Overflow.REFUSED, -1
    return Overflow.CUT, None


def first_tokens(tokenizer: TokenizerLike, text: str, num_tokens: int) -> str:
    """Return the beginning of ``text`` with at most ``num_tokens`` tokens."""
    token_ids = tokenizer.encode(text, False)
    if len(token_ids) <= num_tokens:
        return text
    kept = b"".join(map(tokenizer.token_bytes, token_ids[:num_tokens])).decode(errors="ignore")
    # Some tokenizers put a space before a text.
    for cut in (kept, kept.removeprefix(" ")):
        if cut and text.startswith(cut) and len(tokenizer.encode(cut, False)) <= num_tokens:
            return cut

    def length(end: int) -> int:
        return len(tokenizer.encode(text[:end], False))

    # Others change the text, so that their tokens do not tell where it ends.
    return text[: bisect_right(range(len(text)), num_tokens, key=length) - 1]


class Input(NamedTuple):
    """Text, or token ids, in the field ``where`` of the request. The model reads ``pair``, another
    text, together with it. ``max_tokens``, if given, limits the tokens that it reads from the
    beginning of the text.
    """

    given: str | tuple[int, ...]
    where: str
    pair: Input | None = None
    max_tokens: int | None = None
    overflow: Overflow = Overflow.REFUSED


def inputs_of(given: str | Sequence[str | int | tuple[int, ...]]) -> list[Input]:
    """Return the texts and token ids of a field ``input``. Raises ParameterError."""
    if isinstance(given, str):
        return [Input(given, "input")]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [Input(cast("tuple[int, ...]", given), "input")]
    if kinds and kinds not in ({str}, {tuple}):
        raise ParameterError(
            "input", "input must be texts, token ids or lists of token ids, not mixed"
        )
    return inputs_in("input", cast("tuple[str | tuple[int, ...], ...]", given))


def truncated_inputs(asked: EmbeddingRequest) -> tuple[list[Input], int | None]:
    """Return the inputs of a request, and ``truncate_prompt_tokens`` of their jobs. Raises
    ParameterError.
    """
    overflow, num_kept = truncation(asked.truncate, asked.truncate_prompt_tokens)
    return [one._replace(overflow=overflow) for one in inputs_of(asked.input)], num_kept


def inputs_in(param: str, given: Sequence[str | tuple[int, ...]]) -> list[Input]:
    """Return the inputs of a field that is a list. Raises ParameterError."""
    if not given:
        raise ParameterError(param, f"{param} must not be empty")
    if len(given) > MAX_INPUTS:
        raise ParameterError(param, f"{param} takes at most {MAX_INPUTS} items, got {len(given)}")
    return [Input(one, f"{param}[{i}]") for i, one in enumerate(given)]


async def jobs_of(
    base: Job, inputs: Sequence[Input], model: ServedModelLike, prompts: PromptPool
) -> list[Job]:
    """Make a job like ``base`` for each input. Of several jobs, each is a part of the request.
    Notices name the inputs that are cut although the client did not ask for it.

    Raises MillraceError that names the invalid input.
    """

    if len(inputs) > 1 and base.part is None:
        base = msgspec.structs.replace(base, part=RequestPart(request_id=base.request_id))

    def prepare_all() -> list[Job]:
        # Embeddings need no sampling, so any seed will do.
        seeds = random.Random(base.request_id)
        return [
            _prepare(base, index, one, model=model, seeds=seeds) for index, one in enumerate(inputs)
        ]

    num_units = sum(len(one.given) + len(one.pair.given if one.pair else ()) for one in inputs)
    return await prompts.run(base.tenant, num_units, prepare_all)


def embedding_pooling(given: EmbeddingPooling | None, model: ServedModelLike) -> Pooling:
    """Return the pooling of embeddings, by default the model's. Raises ParameterError for a model
    without embeddings.
    """
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
    """Return the classifier of a model. Raises ParameterError for a model without labels."""
    if model.classifier is None:
        raise ParameterError("model", "This model has no classification head: it makes no labels.")
    return model.classifier


def user_of(given: str | None) -> str:
    """Return the user. Raises ParameterError for a name that is too long."""
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
    for part in _parts(one):
        if not part.given:
            raise ParameterError(part.where, f"{part.where} must not be empty")
    request_id = f"{base.request_id}.{index}" if index else base.request_id
    of_input = None if base.part is None else msgspec.structs.replace(base.part, choice=index)
    base = msgspec.structs.replace(base, request_id=request_id, part=of_input)
    short = _shortened(one, model)
    for part in _parts(short):
        if not part.given:
            raise ParameterError(
                part.where,
                f"{part.where}: its first character has more tokens than the limit of "
                f"{part.max_tokens}; give a higher limit.",
            )
    try:
        return _fitting(base, short, model, seeds)
    except ParameterError as error:
        fields = {"prompt": one, "prompt_token_ids": one, _PAIR_FIELD: one.pair}
        field = error.param.partition("[")[0]
        at_fault = fields.get(field)
        if at_fault is None:
            raise
        param, message = (
            text.replace(field, at_fault.where, 1) for text in (error.param, error.message)
        )
        raise ParameterError(param, message) from error


def _parts(one: Input) -> tuple[Input, ...]:
    return (one,) if one.pair is None else (one, one.pair)


def _shortened(one: Input, model: ServedModelLike) -> Input:
    """Cut the texts of the input to their ``max_tokens``."""
    if one.max_tokens is not None and isinstance(one.given, str):
        one = one._replace(given=first_tokens(model.tokenizer, one.given, one.max_tokens))
    return one if one.pair is None else one._replace(pair=_shortened(one.pair, model))


def _fitting(base: Job, one: Input, model: ServedModelLike, seeds: random.Random) -> Job:
    """Make a job for the input. An input that does not fit the context window is cut, or refused
    with ContextLengthError, as its ``overflow`` says."""
    try:
        return model.prepare(_job(base, one), seeds)
    except ContextLengthError as error:
        last = _parts(one)[-1]
        if last.overflow is Overflow.REFUSED:
            error.param = last.where
            raise
        cut = _cut_job(base, one, model)
        if cut.text_pair == "":
            # The first text alone fills the window.
            error.param = one.where
            raise
    if last.overflow is Overflow.CUT_WITH_NOTICE:
        cut = msgspec.structs.replace(cut, notices=(notice(NoticeCode.TEXT_CUT, last.where),))
    return model.prepare(cut, seeds)


def _cut_job(base: Job, one: Input, model: ServedModelLike) -> Job:
    """Make a job for the beginning of the input that fits the context window."""
    room, classifier = model.context_window_tokens, model.classifier
    if not isinstance(one.given, str):
        return _job(base, one._replace(given=one.given[:room]))
    if one.pair is not None and not (classifier and classifier.joins_pairs):
        # The longer text of a pair is cut at its end.
        return msgspec.structs.replace(_job(base, one), truncate_prompt_tokens=-1)
    before = one.given if one.pair is not None else ""
    left = max(room - len(model.tokenizer.encode(before)), 0)
    if one.pair is None:
        return _job(base, _shortened(one._replace(max_tokens=left), model))
    return _job(base, _shortened(one._replace(pair=one.pair._replace(max_tokens=left)), model))


def _job(base: Job, one: Input) -> Job:
    is_text = isinstance(one.given, str)
    return msgspec.structs.replace(
        base,
        prompt=one.given if is_text else None,
        prompt_token_ids=None if is_text else one.given,
        text_pair=None if one.pair is None else str(one.pair.given),
    )
