"""Served model: its tokenizer, its limits, and the preparation of jobs."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from millrace.registry.adapters import outline_for
from millrace.registry.catalogue import Catalogue, GenerationConfig, ModelEntry
from millrace.registry.chat_template import CONTINUE_FIELD
from millrace.registry.checkpoints.adapters.outline import AdapterOutline
from millrace.registry.checkpoints.checkpoint import (
    ModelOutline,
    read_model_config,
    read_model_outline,
)
from millrace.registry.checkpoints.classifier import ClassifierHead
from millrace.registry.checkpoints.sentence_embedding import read_embedding_defaults
from millrace.registry.checkpoints.side_files import read_sampling_defaults
from millrace.registry.prompt_parts import prompt_parts
from millrace.registry.reasoning import closing_of, format_after, format_within
from millrace.registry.source import resolve
from millrace.registry.tokenizers.long_texts import TextTooLongError
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.context_length import PromptParts
from millrace.schemas.engines import PROMISES, EngineKind, check_supported
from millrace.schemas.errors import ConfigError, ContextLengthError, ParameterError
from millrace.schemas.jobs import Job, Tier, asked_of
from millrace.schemas.notices import NoticeCode, bounded, notice
from millrace.schemas.pooling import ModelTask, Pooling
from millrace.schemas.sampling import MAX_SEED, SamplingDefaults, SamplingOptions
from millrace.schemas.tools import ToolFormat

_MADE: Mapping[ModelTask, str] = {
    "generate": "completions",
    "embed": "embeddings",
    "score": "scores of pairs of texts",
    "classify": "labels of texts",
}
# Number of a prompt's last tokens that surely holds the beginning of an answer.
_TAIL_TOKENS = 32
# Fields that the preparation of an embedding sets, so that later code finds numbers.
_FILLED_IN = frozenset({"max_tokens", "seed"})
# Maximum characters of a token, except for long runs of one character.
_MOST_TOKEN_CHARACTERS = 32


class EmbeddingSettings(NamedTuple):
    """Default embedding settings of a model; ``normalize``: scaled to length 1."""

    pooling: Pooling
    normalize: bool


class ServedModel:
    """Model without its weights. Immutable; safe to share between threads."""

    def __init__(
        self, entry: ModelEntry, path: Path, config: ModelOutline, tokenizer: Tokenizer
    ) -> None:
        self.entry = entry
        self.engine_kind = entry.engine_kind
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.context_window_tokens = _context_window_tokens(entry, config)
        self.eos_token_ids = tokenizer.eos_token_ids
        self.vocab_size = config.vocab_size
        self.prices = entry.prices
        self.sampling_defaults = sampling_defaults_of(entry, path)

    @classmethod
    def load(
        cls, catalogue: Catalogue, name: str, *, control_tokens_in_content: bool = False
    ) -> ServedModel:
        """Find the model's files and read all but the weights. Missing files are fetched from the
        hub.

        ``control_tokens_in_content`` is the setting of that name.

        Raises:
            ModelNotFoundError: the catalogue has no such model.
            ModelSourceError: the files cannot be fetched.
            CheckpointError: the files are invalid or not supported.
            ConfigError: the catalogue's entry does not fit the files.
        """
        entry = catalogue.get(name)
        path = resolve(entry)
        tokenizer = Tokenizer.load(
            path,
            entry.tool_format,
            entry.reasoning_format,
            control_tokens_in_content=control_tokens_in_content,
        )
        return cls(entry, path, outline_of(entry, path), tokenizer)

    def adapter_outline(self, folder: Path) -> AdapterOutline:
        """Return the LoRA adapter in ``folder``, if it fits the model. Raises AdapterError."""
        return outline_for(self.path, folder)

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's tool calls; None if it takes no messages, and so no tools."""
        return self.tokenizer.tool_format

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the model's reasoning; None if it has none."""
        return self.tokenizer.reasoning_format

    def with_chat_template(self, source: str) -> Self:
        """Return the model with a request's chat template; the formats of calls and reasoning stay.

        Raises:
            ParameterError: ("chat_template") the template is invalid.
        """
        model = copy.copy(self)
        model.tokenizer = self.tokenizer.with_chat_template(source)
        return model

    def prepare(self, job: Job, seed_source: random.Random, *, in_frames: bool = True) -> Job:
        """Return the prepared job, with ``prompt_token_ids`` instead of prompt, messages and tools.

        Every sampling field that was not given is set: from the model's ``sampling_defaults``,
        otherwise to the usual default. The seed is drawn, and ``max_tokens`` is the rest of the
        context window. Prepared fields stay as they are, even if the model's defaults have changed.
        A job with ``pooling`` has ``max_tokens`` 1.

        Raises:
            ParameterError: names the field. The tier may not use the model; its engine does not
                support a parameter; the model makes no completions or no embeddings; an embedding
                has parameters of completions; a pair of texts is not for a classifier; the prompt
                is empty; the template refuses the conversation; a token id is unknown; or there are
                several choices although it is answered ``in_frames``.
            ContextLengthError: the prompt does not fit.
        """
        self._check_tier(job.tier)
        check_supported(job.sampling, job.pooling, self.engine_kind)
        for name in ("tools", "chat_template_kwargs"):
            if getattr(job, name) and job.messages is None:
                raise ParameterError(name, f"{name}: allowed only with messages")
        if job.messages is None and not job.add_generation_prompt:
            raise ParameterError(
                "add_generation_prompt", "add_generation_prompt: false needs messages"
            )
        if job.messages is None and job.continue_final_message:
            raise ParameterError(CONTINUE_FIELD, f"{CONTINUE_FIELD} needs messages")
        if job.text_pair is not None and (
            job.pooling is not Pooling.CLASSIFY or job.prompt is None
        ):
            raise ParameterError("text_pair", "text_pair needs a text prompt and pooling: classify")
        if job.pooling is not None:
            return self._prepare_pooled(job, job.pooling, seed_source)
        if not self.config.has_head:
            raise ParameterError(
                "model",
                f"The model {self.entry.name} makes {_MADE[self.task]} only, no completions.",
            )
        token_ids, sampling = self._prompt_token_ids(job), job.sampling
        if job.messages is not None:
            token_ids, sampling = self._with_reasoning(job, token_ids)
        if sampling.max_reasoning_tokens is not None:
            job, sampling = self._with_budget(job, sampling)
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(sampling, field):
                self._check_token_id(field, token_id)
        if in_frames and sampling.n != sampling.num_answers:
            raise ParameterError(
                "n", "n must be 1, except with use_beam_search: one request makes one completion."
            )
        max_tokens = self._max_tokens(job, len(token_ids), sampling)
        predicted = predicted_tokens(job.prediction, self.tokenizer, self.vocab_size, max_tokens)
        job = msgspec.structs.replace(job, sampling=sampling, prediction=predicted)
        return _prepared(job, token_ids, max_tokens, self.sampling_defaults, seed_source)

    def _with_reasoning(
        self, job: Job, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], SamplingOptions]:
        """Return the prompt of messages, and how its completion may begin with reasoning.

        Reasoning is ended in the prompt if the engine would apply the answer's grammar to it.
        """
        sampling = job.sampling
        reasoning = self.reasoning_format
        if reasoning is None:
            return token_ids, sampling
        last = job.messages[-1] if job.messages and job.continue_final_message else None
        if last is not None and (last.content or last.reasoning):
            begun = format_within(last.content, last.reasoning, reasoning)
        else:
            tail = self.tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
            begun = format_after(tail, reasoning)
        is_held = sampling.grammar is not None
        if begun is not None and is_held and not PROMISES[self.engine_kind].reasons_before_grammars:
            closing = self.tokenizer.encode(closing_of(begun), add_special_tokens=False)
            token_ids, begun = (*token_ids, *closing), None
        return token_ids, msgspec.structs.replace(sampling, reasoning=begun)

    def _with_budget(self, job: Job, sampling: SamplingOptions) -> tuple[Job, SamplingOptions]:
        """Drop a reasoning budget that cannot be enforced; it is no reason to refuse a request. A
        notice says so if the completion may have reasoning.
        """
        has_thoughts = sampling.reasoning is not None
        if has_thoughts and PROMISES[self.engine_kind].bounds_reasoning:
            return job, sampling
        sampling = msgspec.structs.replace(sampling, max_reasoning_tokens=None)
        # After a plain prompt, reasoning is not separated from the answer.
        if has_thoughts or (job.messages is None and self.reasoning_format is not None):
            told = notice(NoticeCode.BUDGET_NOT_ENFORCED, "max_reasoning_tokens")
            job = msgspec.structs.replace(job, notices=bounded((*job.notices, told)))
        return job, sampling

    @property
    def classifier(self) -> ClassifierHead | None:
        """Classification head, if the model makes scores for labels and nothing else."""
        return self.config.classifier

    @property
    def task(self) -> ModelTask:
        """Task of the model."""
        if self.config.has_head:
            return "generate"
        if self.classifier is None:
            return "embed"
        return "score" if self.classifier.scores_pairs else "classify"

    def _prepare_pooled(self, job: Job, pooling: Pooling, seed_source: random.Random) -> Job:
        for name in ("messages", "prediction"):
            if getattr(job, name):
                raise ParameterError(name, f"An embedding is made of a prompt, not of {name}.")
        _check_nothing_is_sampled(job.sampling)
        if (pooling is Pooling.CLASSIFY) is (self.classifier is None):
            raise ParameterError(
                "pooling",
                f"The model {self.entry.name} has no classification head"
                if self.classifier is None
                else f"The model {self.entry.name} makes {_MADE[self.task]} only, no embeddings",
            )
        token_ids = self._prompt_token_ids(job)
        if len(token_ids) > self.context_window_tokens:
            raise self._too_long(job, len(token_ids))
        return _prepared(job, token_ids, 1, SamplingDefaults(), seed_source)

    @property
    def embedding_size(self) -> int:
        """Number of values in an embedding."""
        return self.config.hidden_size

    @cached_property
    def embedding_defaults(self) -> EmbeddingSettings:
        """Embedding settings of the catalogue, then of the checkpoint; by default the mean, scaled
        to length 1.

        Raises:
            CheckpointError: the checkpoint needs an unsupported pooling.
        """
        says = read_embedding_defaults(self.path)
        pooling = Pooling(self.entry.pooling or says.pooling or Pooling.MEAN)
        return EmbeddingSettings(pooling, says.normalize is not False)

    def _check_tier(self, tier: Tier) -> None:
        if tier not in self.entry.tiers:
            tiers = ", ".join(self.entry.tiers)
            raise ParameterError(
                "service_tier",
                f"The model {self.entry.name} is for the service tiers {tiers}, "
                f"not for {tier}. Name one of them, or another model.",
            )

    def _prompt_token_ids(self, job: Job) -> tuple[int, ...]:
        """Return the prompt's token ids, truncated if the job asks for it.

        Raises:
            ContextLengthError: the prompt does not fit; mostly found before it is tokenized.
        """
        num_kept = num_kept_tokens(job, self.context_window_tokens)
        token_ids = self._whole_prompt(job, None if num_kept else self.context_window_tokens)
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def _whole_prompt(self, job: Job, window_tokens: int | None) -> tuple[int, ...]:
        """Return the prompt's token ids; at most ``window_tokens`` if given."""
        token_ids: Sequence[int] = ()
        if job.prompt_token_ids is not None:
            field, token_ids = "prompt_token_ids", job.prompt_token_ids
            if window_tokens is not None and len(token_ids) > window_tokens:
                raise self._too_long(job, len(token_ids))
        try:
            if job.messages is not None:
                field, chat = "messages", self.tokenizer.encode_chat
                token_ids = chat(
                    job.messages,
                    job.tools,
                    max_tokens=window_tokens,
                    add_generation_prompt=job.add_generation_prompt,
                    continue_final_message=job.continue_final_message,
                    arguments=job.chat_template_kwargs,
                )
            elif job.prompt_token_ids is None:
                field, prompt = "prompt", job.prompt or ""
                if prompt:
                    token_ids = self._encode(job, prompt, window_tokens)
        except TextTooLongError as error:
            raise self._too_long(job, error.num_tokens, is_exact=error.is_exact) from None
        if not token_ids:
            raise ParameterError(field, f"{field} must not be empty")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.config.vocab_size:
                self._check_token_id(f"{field}[{token_ids.index(token_id)}]", token_id)
        return tuple(token_ids)

    def _encode(self, job: Job, prompt: str, window_tokens: int | None) -> list[int]:
        pair, classifier = job.text_pair, self.classifier
        if pair is None or classifier is None:
            return self.tokenizer.encode(prompt, max_tokens=window_tokens)
        if not pair:
            raise ParameterError("text_pair", "text_pair must not be empty")
        if classifier.joins_pairs:
            return self.tokenizer.encode(prompt + pair, max_tokens=window_tokens)
        longest = self.context_window_tokens
        num_kept = num_kept_tokens(job, longest)
        return self.tokenizer.encode_pair(prompt, pair, max_tokens=longest, num_kept=num_kept)

    def _too_long(
        self, job: Job, num_prompt_tokens: int, *, is_exact: bool = True
    ) -> ContextLengthError:
        return ContextLengthError(
            num_prompt_tokens,
            None if job.pooling is not None else job.sampling.max_tokens,
            self.context_window_tokens,
            field="prompt" if job.messages is None else "messages",
            is_exact=is_exact,
            parts=self.prompt_parts(job, num_prompt_tokens if is_exact else None),
        )

    def prompt_parts(self, job: Job, num_prompt_tokens: int | None) -> PromptParts | None:
        """Return the lengths of the parts of the job's prompt, as
        ``registry.prompt_parts.prompt_parts`` does.
        """
        return prompt_parts(self.tokenizer, job, num_prompt_tokens)

    def _check_token_id(self, field: str, token_id: int) -> None:
        last = self.config.vocab_size - 1
        if not 0 <= token_id <= last:
            raise ParameterError(
                field, f"{field} has the token id {token_id}; this model's ids are 0 to {last}"
            )

    def _max_tokens(self, job: Job, num_prompt_tokens: int, sampling: SamplingOptions) -> int:
        left = self.context_window_tokens - num_prompt_tokens
        wanted = sampling.max_tokens
        if left < (wanted or 1):
            raise self._too_long(job, num_prompt_tokens)
        if wanted is not None:
            return wanted
        usual = self.sampling_defaults.max_tokens
        return left if usual is None else min(left, max(usual, sampling.min_tokens))


def outline_of(entry: ModelEntry, path: Path) -> ModelOutline:
    """Return the model's properties from ``path``. Raises CheckpointError if the entry's engine
    cannot run it, as far as is known here.
    """
    if entry.engine_kind is EngineKind.REAL:
        return read_model_config(path)
    is_simulated = entry.engine_kind is EngineKind.SIMULATED
    return read_model_outline(path, any_architecture=not is_simulated)


def sampling_defaults_of(entry: ModelEntry, path: Path) -> SamplingDefaults:
    """Return the sampling defaults of ``path`` that the entry's engine supports; none if the entry
    ignores them.

    Raises:
        CheckpointError: a recommended value is invalid.
    """
    if entry.generation_config is GenerationConfig.IGNORE:
        return SamplingDefaults()
    defaults = read_sampling_defaults(path)
    beyond = PROMISES[entry.engine_kind].unsupported.intersection(defaults.__struct_fields__)
    return msgspec.structs.replace(defaults, **dict.fromkeys(beyond))


def _prepared(
    job: Job,
    token_ids: tuple[int, ...],
    max_tokens: int,
    defaults: SamplingDefaults,
    seed_source: random.Random,
) -> Job:
    sampling = job.sampling
    seed = seed_source.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed
    return msgspec.structs.replace(
        job,
        prompt=None,
        text_pair=None,
        messages=None,
        tools=(),
        chat_template_kwargs={},
        add_generation_prompt=True,
        continue_final_message=False,
        truncate_prompt_tokens=None,
        prompt_token_ids=token_ids,
        sampling=sampling.with_defaults(defaults, seed=seed, max_tokens=max_tokens),
        asked=asked_of(job),
    )


def _check_nothing_is_sampled(sampling: SamplingOptions) -> None:
    for name in SamplingOptions.__struct_fields__:
        if name not in _FILLED_IN and sampling.asks_for(name):
            raise ParameterError(name, f"An embedding takes no {name}: nothing is sampled.")


def _context_window_tokens(entry: ModelEntry, config: ModelOutline) -> int:
    """Return the catalogue's window; it must be within the checkpoint's. Raises ConfigError."""
    longest = config.context_window_tokens
    wanted = entry.context_window_tokens
    if wanted is None:
        return longest
    if wanted > longest:
        raise ConfigError(
            f"Model {entry.name}: context_window_tokens is {wanted} in the catalogue, but the "
            f"checkpoint supports at most {longest} (max_position_embeddings with RoPE scaling)."
        )
    return wanted


def num_kept_tokens(job: Job, window_tokens: int) -> int | None:
    """Return the maximum number of prompt tokens to keep; None if a longer prompt is not truncated.
    Raises ParameterError.
    """
    wanted = job.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted == -1:
        room = 0 if job.pooling is not None else (job.sampling.max_tokens or 1)
        return max(window_tokens - room, 1)
    if not 1 <= wanted <= window_tokens:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or between 1 and {window_tokens}, got {wanted}",
        )
    return wanted


def predicted_tokens(
    predicted: str | tuple[int, ...], tokenizer: Tokenizer, vocab_size: int, max_tokens: int
) -> tuple[int, ...]:
    """Return the token ids of a prediction, at most as many as the completion can have.

    Raises:
        ParameterError: the model does not have a token id.
    """
    if isinstance(predicted, str):
        text = predicted[: max_tokens * _MOST_TOKEN_CHARACTERS]
        predicted = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
    predicted = predicted[:max_tokens]
    if predicted and not 0 <= min(predicted) <= max(predicted) < vocab_size:
        raise ParameterError(
            "prediction", f"prediction has a token id that is not one of the model's {vocab_size}."
        )
    return predicted
