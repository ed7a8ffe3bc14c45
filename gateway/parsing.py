"""From a caller's JSON to a job, refusing by name what is not honoured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.errors import InvalidJsonError
from gateway.grammar_fields import grammar_of
from schemas.errors import ParameterError
from schemas.jobs import ChatMessage, Tier
from schemas.openai import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    Message,
)
from schemas.sampling import SamplingParams
from schemas.tools import ToolChoice, ToolDefinition
from schemas.websocket import Generate

_T = TypeVar("_T")

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_LABEL_CHARACTERS = 256
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TIERS = {
    "auto": Tier.FREE,
    "default": Tier.FREE,
    "flex": Tier.BATCH,
    "priority": Tier.ENTERPRISE,
} | {tier.value: tier for tier in Tier}

# Fields that are known but not honoured, with the values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, [], {})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "metadata": _NOTHING,
    "tools": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "store": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "include_obfuscation": (None, False),
}
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": _NOTHING,
    "audio": (None,),
    "tool_calls": _NOTHING,
    "tool_call_id": (None,),
    "function_call": (None,),
}

# Entries of an object have no name of their own there.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])*`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]+)`")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is well formed: what to continue, how, and for whom.

    Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is given. ``sampling.n`` choices
    are made, each by a job of its own. ``tier`` None is the caller's own. ``tools`` are those that
    the client runs, ``server_tools`` names of those that the gateway runs.
    """

    model: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    server_tools: tuple[str, ...] = ()
    sampling: SamplingParams
    tier: Tier | None = None
    user: str = ""
    session_id: str = ""
    session_keep: int | None = None
    echo: bool = False

    @property
    def num_prompt_characters(self) -> int:
        """How much text there is to tokenise."""
        if self.messages is not None:
            return sum(len(message.content) for message in self.messages)
        return len(self.prompt or "")


def decode(decoder: msgspec.json.Decoder[_T], body: bytes | str) -> _T:
    """The typed body. Raises InvalidJsonError, or ParameterError naming the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _parameter_error(str(error)) from error
    except RecursionError as error:
        raise InvalidJsonError("The JSON is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidJsonError(f"The body is not valid JSON: {error}") from error


def chat_ask(request: ChatCompletionRequest) -> Ask:
    """Raises ParameterError for whatever cannot be honoured."""
    _check_stream_options(request)
    return _ask(request, messages=chat_messages(request.messages))


def completion_ask(request: CompletionRequest) -> Ask:
    """Raises ParameterError for whatever cannot be honoured."""
    _check_stream_options(request)
    return _ask(request, prompt=request.prompt, default_max_tokens=_DEFAULT_COMPLETION_TOKENS)


def socket_ask(message: Generate) -> Ask:
    """Raises ParameterError for whatever cannot be honoured."""
    if (message.messages is None) == (message.prompt is None):
        raise ParameterError("messages", "Give exactly one of messages and prompt.")
    if message.messages is not None:
        return _ask(message, messages=chat_messages(message.messages))
    return _ask(message, prompt=message.prompt)


def chat_messages(messages: tuple[Message, ...]) -> tuple[ChatMessage, ...]:
    """The conversation as jobs carry it: parts of text joined, ``developer`` read as ``system``."""
    if not messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    return tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _chat_message(message: Message, where: str) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise ParameterError(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}.")
    _refuse_unhonoured(message, _NEUTRAL_IN_MESSAGE, f"{where}.")
    content = message.content
    if content is None:
        raise ParameterError(f"{where}.content", f"{where}.content must be text.")
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    return ChatMessage(role, content, message.name)


def _ask(
    request: GenerationFields,
    *,
    messages: tuple[ChatMessage, ...] | None = None,
    prompt: Any = None,
    default_max_tokens: int | None = None,
) -> Ask:
    _refuse_unhonoured(request, _NEUTRAL, "")
    tier = _TIERS.get(request.service_tier or "auto")
    if tier is None:
        raise ParameterError("service_tier", f"service_tier must be one of {', '.join(_TIERS)}.")
    text, token_ids = (None, None) if messages is not None else _prompt(prompt)
    return Ask(
        model=request.model,
        prompt=text,
        messages=messages,
        prompt_token_ids=token_ids,
        sampling=_sampling(request, default_max_tokens),
        tier=tier,
        user=_label("user", request.user),
        session_id=_label("session_id", request.session_id),
    )


def _sampling(request: GenerationFields, default_max_tokens: int | None) -> SamplingParams:
    stop = request.stop or ()
    given = {
        "max_tokens": _max_tokens(request, default_max_tokens),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        "stop": (stop,) if isinstance(stop, str) else stop,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": request.logit_bias,
        "typical_p": request.typical_p,
        "min_tokens": request.min_tokens,
        "bad_words": request.bad_words,
        "grammar": grammar_of(request),
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _max_tokens(request: GenerationFields, default: int | None) -> int | None:
    newer = request.max_completion_tokens if isinstance(request, ChatFields) else None
    older = request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise ParameterError(
            "max_tokens", "max_tokens and max_completion_tokens differ; give one of them."
        )
    if newer is not None:
        if newer < 1:
            raise ParameterError(
                "max_completion_tokens", f"max_completion_tokens must be at least 1, got {newer}"
            )
        return newer
    return default if older is None else older


def _prompt(prompt: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Text or token ids out of the four shapes that OpenAI's API knows."""
    if isinstance(prompt, list) and prompt and not _are_token_ids(prompt):
        if len(prompt) > 1:
            raise ParameterError("prompt", "Only one prompt is taken per request.")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and _are_token_ids(prompt):
        return None, tuple(prompt)
    raise ParameterError(
        "prompt", "prompt must be text, a list of token ids, or a list with one of these."
    )


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _label(param: str, value: str | None) -> str:
    if value is None:
        return ""
    if len(value) > _MAX_LABEL_CHARACTERS:
        raise ParameterError(
            param, f"{param} must have at most {_MAX_LABEL_CHARACTERS} characters."
        )
    return value


def _check_stream_options(request: ChatCompletionRequest | CompletionRequest) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        raise ParameterError("stream_options", "stream_options goes only with stream: true.")
    _refuse_unhonoured(request.stream_options, _NEUTRAL, "stream_options.")


def _refuse_unhonoured(
    struct: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    for name in struct.__struct_fields__:
        allowed = neutral.get(name)
        if allowed is None:
            continue
        value = getattr(struct, name)
        if value is None or any(_same(value, nothing) for nothing in allowed):
            continue
        if name == "n":
            raise ParameterError(name, "n must be 1: one request makes one completion.")
        raise ParameterError(f"{prefix}{name}", f"{prefix}{name} is not supported; leave it out.")


def _same(value: Any, nothing: Any) -> bool:
    return isinstance(value, bool) == isinstance(nothing, bool) and bool(value == nothing)


def _parameter_error(text: str) -> ParameterError:
    """Name the field out of the decoder's sentence."""
    path = _PATH.search(text)
    field = _FIELD.search(text)
    where = path.group(1) if path else ""
    param = ".".join(part for part in (where, field.group(1) if field else "") if part)
    if text.startswith("Object contains unknown field"):
        return ParameterError(param, f"{param} is not a field of this request; leave it out.")
    if text.startswith("Object missing required field"):
        return ParameterError(param, f"{param} is required.")
    sentence = _PATH.sub("", text)
    return ParameterError(param, f"{param}: {sentence}" if param else sentence)
