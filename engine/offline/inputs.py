"""Conversion of ``LLM`` arguments to prepared requests, or to errors that name an argument."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

import msgspec

from millrace.engine.offline.chat import NO_CHAT, OfflineChat, read_chat
from millrace.engine.offline.generated import OfflineRequest, generation_job
from millrace.registry.catalogue import load_catalogue
from millrace.registry.checkpoints.checkpoint import why_not_own
from millrace.registry.served import ServedModel
from millrace.registry.source import resolve
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind, check_parallel, check_quantization
from millrace.schemas.errors import CheckpointError, ConfigError, MillraceError, ParameterError
from millrace.schemas.jobs import Job
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.pooling import EmbeddingPooling, Pooling
from millrace.schemas.sampling import SamplingOptions

Prompt = str | Sequence[int]
"""Text, or token ids."""
Prompts = Prompt | Sequence[Prompt]
Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content``, as in OpenAI's API."""
Conversations = Conversation | Sequence[Conversation]
Sampling = SamplingOptions | Sequence[SamplingOptions] | None
AdapterNames = str | Sequence[str | None] | None
_ValueT = TypeVar("_ValueT")

# Maximum adapter slots; more adapters share them.
_MOST_SLOTS = 20
# Options of a chat that are also fields of a job.
_JOB_OPTIONS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class ChatOptions(TypedDict, total=False):
    """Options that convert conversations to prompts.

    ``tools``, ``tool_choice`` and ``parallel_tool_calls`` (default True) are as in OpenAI's API.
    ``chat_template`` is a Jinja template that replaces the model's, and ``chat_template_kwargs``
    are further variables of it, such as ``enable_thinking``. Without ``add_generation_prompt`` the
    prompt does not begin the answer; with ``continue_final_message`` the answer continues the last
    message.
    """

    tools: Sequence[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class OfflineRequests:
    """Factory of the requests of calls, each with an id of its own.

    A request may name one of the ``adapters``. Methods raise ParameterError or ContextLengthError,
    with a note of the position in the argument.
    """

    def __init__(self, served: ServedModel, adapters: Mapping[str, AdapterRef]) -> None:
        self._served = served
        self._adapters = adapters
        self._numbers = itertools.count()
        self._seed_source = random.Random()

    def completions(
        self, prompts: Prompts, sampling: Sampling, adapter: AdapterNames
    ) -> list[OfflineRequest]:
        """Make requests that continue texts or token ids."""
        fields = [prompt_fields(prompt) for prompt in listed_prompts("prompts", prompts)]
        asks = [(NO_CHAT, one) for one in fields]
        return self._generations("prompts", self._served, asks, sampling, adapter)

    def chats(
        self,
        messages: Conversations,
        sampling: Sampling,
        adapter: AdapterNames,
        options: ChatOptions,
    ) -> list[OfflineRequest]:
        """Make requests that answer conversations."""
        served = self._served
        template = options.get("chat_template")
        if template is not None:
            served = served.with_chat_template(template)
        given: Mapping[str, Any] = options
        fields = {name: given[name] for name in _JOB_OPTIONS if name in given}
        asks = []
        for i, conversation in enumerate(_listed_conversations(messages)):
            with _at_position("messages", i):
                chat = read_chat(
                    conversation,
                    options.get("tools", ()),
                    options.get("tool_choice"),
                    parallel=options.get("parallel_tool_calls", True),
                )
                asks.append((chat, fields))
        return self._generations("messages", served, asks, sampling, adapter)

    def pooled(
        self,
        name: str,
        prompts: Sequence[dict[str, Any]],
        pooling: Pooling,
        truncate_prompt_tokens: int | None,
    ) -> list[OfflineRequest]:
        """Make requests for embeddings or labels.

        ``prompts`` are fields of jobs, from the argument ``name``.
        """
        requests = []
        for i, fields in enumerate(prompts):
            with _at_position(name, i):
                job = Job(
                    request_id=str(next(self._numbers)),
                    model=self._served.entry.name,
                    pooling=pooling,
                    truncate_prompt_tokens=truncate_prompt_tokens,
                    **fields,
                )
                prepared = self._served.prepare(job, self._seed_source, in_frames=False)
                requests.append(OfflineRequest(id=i, job=prepared))
        return requests

    def _generations(
        self,
        name: str,
        served: ServedModel,
        asks: Sequence[tuple[OfflineChat, dict[str, Any]]],
        sampling: Sampling,
        adapter: AdapterNames,
    ) -> list[OfflineRequest]:
        samplings = _one_each("sampling_params", sampling, SamplingOptions, len(asks))
        adapters = _one_each("adapter", adapter, str, len(asks))
        requests = []
        for i, (chat, fields) in enumerate(asks):
            with _at_position(name, i):
                job = generation_job(
                    served,
                    self._seed_source,
                    request_id=str(next(self._numbers)),
                    sampling=_checked_sampling(samplings[i] or SamplingOptions()),
                    chat=chat,
                    **fields,
                )
            requests.append(
                OfflineRequest(
                    id=i,
                    job=job,
                    adapter=self._adapter(adapters[i]),
                    tool_format=served.tool_format if chat.tools else None,
                    tools=chat.tools,
                    freeform=tuple(chat.freeform),
                )
            )
        return requests

    def _adapter(self, name: str | None) -> AdapterRef | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none; LLM(adapters=…) names them"
            raise ParameterError(
                "adapter", f"There is no adapter {name!r:.200}. Adapters: {known}."
            )
        return self._adapters[name]


def load_served(
    model: str | Path, catalogue: str | Path = "", *, asker: str = "LLM"
) -> ServedModel:
    """Read everything but the weights of a model: a folder, an address, a hub id or a catalogue
    entry.

    ``asker`` is the name of the caller in errors. Raises ModelNotFoundError, ModelSourceError,
    CheckpointError or ConfigError.
    """
    known = load_catalogue(str(catalogue))
    # A path that does not exist must not be taken for a hub id.
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    entry = known.entry_for(name)
    if entry.is_gguf and (reason := why_not_own(resolve(entry))):
        raise CheckpointError(
            f"{entry.source} is a GGUF file that {asker} cannot compute: {reason}. Serve it on "
            f"llama.cpp with millrace up --model {entry.source}, or name a checkpoint in Hugging "
            "Face layout here."
        )
    return ServedModel.load(known.with_model(name), entry.name)


def engine_settings(settings: dict[str, Any]) -> EngineConfig:
    """Read settings of an engine. Raises ConfigError for an unknown setting or an invalid value."""
    unknown = sorted(settings.keys() - EngineConfig.__struct_fields__)
    if unknown:
        raise ConfigError(
            f"There is no setting {unknown[0]}. LLM takes those of worker.engine in "
            "docs/configuration.md."
        )
    try:
        config = msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The settings of LLM cannot be read: {error}.") from error
    check_quantization(config.quantization, EngineKind.REAL)
    check_parallel(
        config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, EngineKind.REAL
    )
    return config


def with_adapter_slots(config: EngineConfig, num_adapters: int) -> EngineConfig:
    """Add a slot for each adapter, up to 20, unless the settings have a number."""
    if not num_adapters or config.max_adapters is not None:
        return config
    return msgspec.structs.replace(config, max_adapters=min(num_adapters, _MOST_SLOTS))


def listed_prompts(name: str, prompts: Prompts) -> list[Prompt]:
    """Return one or several prompts as a list. Raises ParameterError for the argument ``name``."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise _no_prompts(name)
    if not prompts:
        raise ParameterError(name, f"{name} must not be empty")
    if isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the field of a job for a prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and all(isinstance(token, Integral) for token in prompt):
        return {"prompt_token_ids": tuple(map(int, prompt))}
    raise _no_prompts("prompts")


def _no_prompts(name: str) -> ParameterError:
    return ParameterError(
        name, f"{name} must be a text, a list of token ids, or a list of texts or of such lists"
    )


def listed_texts(name: str, texts: str | Sequence[str]) -> list[str]:
    """Return one or several texts as a list. Raises ParameterError for the argument ``name``."""
    if isinstance(texts, str):
        return [texts]
    many = list(texts) if isinstance(texts, Sequence) else []
    if not many or not all(isinstance(text, str) for text in many):
        raise ParameterError(name, f"{name} must be a text or a list of texts, and not empty")
    return many


def _listed_conversations(messages: Conversations) -> list[Conversation]:
    """Return one or several conversations as a list. Raises ParameterError."""
    given: object = messages
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ParameterError(
            "messages", "messages must be a list of messages, or of such lists, and not empty"
        )
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _one_each(
    name: str, given: _ValueT | Sequence[_ValueT | None] | None, kind: type[_ValueT], count: int
) -> list[_ValueT | None]:
    """Return a value for each of ``count`` prompts.

    ``given`` is one value for all, or a list with one for each. Raises ParameterError for the
    argument ``name``.
    """
    if given is None or isinstance(given, kind):
        return [given] * count
    many = list(given) if isinstance(given, Sequence) else []
    if len(many) != count or not all(one is None or isinstance(one, kind) for one in many):
        raise ParameterError(
            name, f"{name} must be one {kind.__name__}, or a list with one for each of {count}"
        )
    return many


def _checked_sampling(sampling: SamplingOptions) -> SamplingOptions:
    """Check the types of all fields, which a constructor does not.

    A single stop string and lists are accepted, too. Raises ParameterError.
    """
    fields = {name: getattr(sampling, name) for name in SamplingOptions.__struct_fields__}
    if isinstance(fields["stop"], str):
        fields["stop"] = (fields["stop"],)
    try:
        return msgspec.convert(fields, SamplingOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, MillraceError):
            raise error.__cause__ from None
        raise ParameterError("sampling_params", f"sampling_params: {error}") from error


def embedding_pooling(name: EmbeddingPooling) -> Pooling:
    """Return the pooling of a name. Raises ParameterError for a name that makes no embedding."""
    if name not in get_args(EmbeddingPooling):
        names = " or ".join(get_args(EmbeddingPooling))
        raise ParameterError("pooling", f"pooling must be {names}, got {name!r:.80}")
    return Pooling(name)


@contextmanager
def _at_position(name: str, position: int) -> Iterator[None]:
    """Add the position in the argument ``name`` to an error."""
    try:
        yield
    except MillraceError as error:
        error.add_note(f"at {name}[{position}]")
        raise
    except ValueError as error:
        raise ParameterError(name, f"{name}[{position}]: {error}") from error
