"""Parser from a caller's JSON to a generation request. Unsupported fields raise an error that names
them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.grammar_fields import grammar_of
from millrace.registry.requests.message_fields import (
    NOTHING,
    chat_messages,
    check_metadata,
    keeps_stop_string,
    left_out_of,
    priority_of,
    refuse_unhonoured,
    respelled,
)
from millrace.registry.requests.offered.chat_tools import offered_of_chat
from millrace.registry.requests.offered.offered_tools import OfferedTools
from millrace.registry.requests.unfit_fields import (
    check_beam_search,
    check_socket_fields,
    check_tools_of_beam_search,
)
from millrace.schemas.chat.messages import Message
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Tier
from millrace.schemas.notices import bounded
from millrace.schemas.openai import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    Prediction,
)
from millrace.schemas.sampling import MAX_SEED, SAMPLING_FIELDS, SamplingOptions
from millrace.schemas.websocket import Generate

_T = TypeVar("_T")

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_LABEL_CHARACTERS = 256
_MAX_PROMPTS = 64
_MAX_COMPLETIONS = 128  # for all prompts of a request; each is a job
_MAX_SESSION_KEEP = 2**31 - 1
_TIERS: dict[str, Tier | None] = {
    "auto": None,
    "default": None,
    "flex": Tier.BATCH,
    "priority": Tier.ENTERPRISE,
} | {tier.value: tier for tier in Tier}

# Unsupported fields, with the values that demand nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "include_obfuscation": (None, False),
    "documents": NOTHING,
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
}

# Fields that are allowed only with messages.
_OF_MESSAGES = ("chat_template", "chat_template_kwargs", "enable_thinking", "thinking_token_budget")


def parse_chat(
    request: ChatCompletionRequest, offered: OfferedTools | None = None
) -> GenerationRequest:
    """Parse a chat request.

    Args:
        offered: the tools of an endpoint with its own form of tools; None: the tools of
            ``request``.

    Raises:
        ParameterError: a field is unsupported or invalid.
    """
    _check_stream(request)
    return _parse_chat(request, request.messages, offered)


def parse_completion(
    request: CompletionRequest, *, default_max_tokens: int | None = _DEFAULT_COMPLETION_TOKENS
) -> GenerationRequest:
    """Parse a completion request.

    Args:
        default_max_tokens: the default of max_tokens; None: the rest of the model's window.

    Raises:
        ParameterError: a field is unsupported or invalid.
    """
    _check_stream(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ParameterError("best_of", "best_of must equal n: all completions are returned.")
    for name in ("session_id", "session_keep"):
        if getattr(request, name) is not None:
            raise ParameterError(name, f"{name} is allowed only with messages, not with prompt.")
    text, token_ids, others = _prompts(request.prompt)
    # An engine makes at least one token.
    is_prompt_only = request.max_tokens == 0 and bool(request.echo)
    if is_prompt_only:
        request = msgspec.structs.replace(request, max_tokens=1)
    sampling = _sampling(request, request.logprobs, default_max_tokens)
    if sampling.n * (1 + len(others)) > _MAX_COMPLETIONS:
        raise ParameterError(
            "n", f"A request may have at most {_MAX_COMPLETIONS} completions: n for each prompt."
        )
    echo = bool(request.echo)
    if echo and request.logprobs is not None:
        if request.prompt_logprobs not in (None, request.logprobs):
            raise ParameterError(
                "prompt_logprobs", "prompt_logprobs must equal logprobs if echo asks for both."
            )
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
    return _generation_request(
        request,
        sampling=sampling,
        prompt=text,
        prompt_token_ids=token_ids,
        other_prompts=others,
        echo=echo,
        tells_completion=not is_prompt_only,
    )


def parse_generate(message: Generate) -> GenerationRequest:
    """Parse a WebSocket message. Raises ParameterError for an unsupported or invalid field."""
    check_socket_fields(message)
    if message.stream_options is not None:
        refuse_unhonoured(message.stream_options, NEUTRAL, "stream_options.")
    if (message.messages is None) == (message.prompt is None):
        raise ParameterError("messages", "Give exactly one of messages and prompt.")
    if message.messages is not None:
        return _parse_chat(message, message.messages)
    for name in ("tools", "server_tools", "session_id", "session_keep", *_OF_MESSAGES):
        if getattr(message, name):
            raise ParameterError(name, f"{name} is allowed only with messages, not with prompt.")
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(message, name) is not None:
            raise ParameterError(name, f"{name} is allowed only with messages, not with prompt.")
    text, token_ids, others = _prompts(message.prompt)
    if others:
        raise ParameterError("prompt", "A message may have only one prompt.")
    sampling = _sampling(message, _num_logprobs(message), None)
    return _generation_request(message, sampling=sampling, prompt=text, prompt_token_ids=token_ids)


def _parse_chat(
    request: ChatFields, messages: tuple[Message, ...], offered: OfferedTools | None = None
) -> GenerationRequest:
    if request.session_keep is not None:
        if request.session_id is None:
            raise ParameterError("session_keep", "session_keep needs session_id.")
        if not 0 <= request.session_keep <= _MAX_SESSION_KEEP:
            raise ParameterError(
                "session_keep", f"session_keep must be between 0 and {_MAX_SESSION_KEEP}."
            )
    if request.session_id is not None and (request.n or 1) > 1:
        raise ParameterError("n", "n must be 1 with session_id: a session has one answer a turn.")
    if request.session_id is not None and request.chat_template is not None:
        raise ParameterError("chat_template", "chat_template is not allowed with session_id.")
    offered = offered_of_chat(request) if offered is None else offered
    _check_prompt_end(request)
    if request.use_beam_search:
        check_tools_of_beam_search(offered)
    parallel = request.parallel_tool_calls
    return _generation_request(
        request,
        sampling=_sampling(request, _num_logprobs(request), None),
        messages=chat_messages(messages),
        tools=offered.tools,
        server_tools=offered.own,
        tool_choice=offered.choice,
        freeform_tools=offered.freeform,
        notices=bounded((*offered.notices, *left_out_of(messages))),
        parallel_tool_calls=True if parallel is None else parallel,
        session_keep=request.session_keep,
        chat_template=request.chat_template,
        chat_template_kwargs=_template_arguments(request),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        include_reasoning=request.include_reasoning is not False,
        prediction=_predicted(request.prediction),
    )


def _predicted(prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _check_prompt_end(request: ChatFields) -> None:
    if request.add_generation_prompt is False and request.server_tools:
        raise ParameterError(
            "add_generation_prompt",
            "add_generation_prompt: false is not allowed with server_tools.",
        )
    if not request.continue_final_message:
        return
    for name in ("add_generation_prompt", "server_tools", "session_id"):
        if getattr(request, name):
            raise ParameterError(
                "continue_final_message", f"continue_final_message is not allowed with {name}."
            )


def _template_arguments(request: ChatFields) -> dict[str, Any]:
    """Return the variables of the chat template, including those with fields of their own."""
    named: dict[str, bool | str | None] = {
        "enable_thinking": request.enable_thinking,
        "reasoning_effort": request.reasoning_effort,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return given | (request.chat_template_kwargs or {})


def _num_logprobs(request: ChatFields) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise ParameterError("top_logprobs", "top_logprobs needs logprobs: true.")
    return None


def _generation_request(
    request: GenerationFields, *, sampling: SamplingOptions, **fields: Any
) -> GenerationRequest:
    asked_grammar = grammar_of(request)
    if asked_grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=asked_grammar.grammar)
    refuse_unhonoured(request, NEUTRAL, "")
    check_metadata(request.metadata)
    asked_tier = request.service_tier or "auto"
    if asked_tier not in _TIERS:
        raise ParameterError("service_tier", f"service_tier must be one of {', '.join(_TIERS)}.")
    return GenerationRequest(
        model=request.model,
        tier=_TIERS[asked_tier],
        user=_user(request),
        session_id=_label("session_id", request.session_id),
        cache_salt=_cache_salt(request),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        priority=priority_of(request.priority),
        metadata=request.metadata or {},
        sampling=sampling,
        grammar_field="" if asked_grammar is None else asked_grammar.field,
        words=_words(request),
        tells_prompt_logprobs=request.prompt_logprobs is not None,
        tells_token_ids=bool(getattr(request, "return_token_ids", None)),
        **fields,
    )


def _sampling(
    request: GenerationFields, logprobs: int | None, default_max_tokens: int | None
) -> SamplingOptions:
    stop = request.stop or ()
    check_beam_search(request)
    if request.allowed_token_ids == ():
        raise ParameterError("allowed_token_ids", "allowed_token_ids must not be empty.")
    given = {name: getattr(request, name, None) for name in SAMPLING_FIELDS}
    # These fields have other forms or names in requests.
    given |= {
        "max_tokens": _max_tokens(request, default_max_tokens),
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "seed": _seed(request.seed),
        "stop": (stop,) if isinstance(stop, str) else stop,
        "include_stop_str_in_output": keeps_stop_string(request),
        "logprobs": logprobs,
    }
    if isinstance(request, ChatFields):
        given["max_reasoning_tokens"] = _budget(request)
    options = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingOptions(**options)
    except ParameterError as error:
        raise respelled(error, _words(request)) from error


def _words(request: GenerationFields) -> dict[str, str]:
    """Return this request's field names by their names in the sampling options."""
    if not isinstance(request, ChatFields):
        return {}
    words = {"max_reasoning_tokens": "thinking_token_budget"}
    if request.top_logprobs is not None:
        words["logprobs"] = "top_logprobs"
    if request.max_completion_tokens is not None:
        words["max_tokens"] = "max_completion_tokens"
    return words


def _seed(given: int | None) -> int | None:
    """Return the seed in 63 bits. -1 leaves the choice to us, as in vLLM; other negative seeds are
    valid.
    """
    if given is None or given == -1:
        return None
    if given < -MAX_SEED:
        raise ParameterError(
            "seed", f"seed must be between {-MAX_SEED} and {MAX_SEED}, got {given}"
        )
    return given & MAX_SEED if given < 0 else given


def _budget(request: ChatFields) -> int | None:
    """Return the reasoning budget in tokens; None without one."""
    budget = request.thinking_token_budget
    if budget is not None and budget < 0:
        raise ParameterError(
            "thinking_token_budget", f"thinking_token_budget must not be negative, got {budget}"
        )
    return budget


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


_Prompts = tuple[str | None, tuple[int, ...] | None, tuple[str | tuple[int, ...], ...]]


def _prompts(prompt: Any) -> _Prompts:
    """Return text or token ids, and further prompts, from the four shapes of OpenAI's API."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        if len(prompt) > _MAX_PROMPTS:
            raise ParameterError("prompt", f"At most {_MAX_PROMPTS} prompts are allowed.")
        first, *others = [_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]
    else:
        first, others = _prompt(prompt, "prompt"), []
    text, token_ids = (first, None) if isinstance(first, str) else (None, first)
    return text, token_ids, tuple(others)


def _prompt(prompt: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        shapes = "text or a list of token ids" + ("" if "[" in where else ", or a list of these")
        raise ParameterError(where, f"{where} must be {shapes}, and no list may be empty.")
    for i, value in enumerate(prompt):
        if type(value) is not int:
            raise ParameterError(
                f"{where}[{i}]", f"{where}[{i}] must be a token id, like the rest of {where}."
            )
    return tuple(prompt)


def _user(request: GenerationFields) -> str:
    older = _label("user", request.user)
    newer = request.safety_identifier if isinstance(request, ChatFields) else None
    return older or _label("safety_identifier", newer)


def _cache_salt(request: GenerationFields) -> str:
    if request.cache_salt == "":
        raise ParameterError("cache_salt", "cache_salt must not be empty; remove it.")
    return _label("cache_salt", request.cache_salt)


def _label(param: str, value: str | None) -> str:
    if value is None:
        return ""
    if len(value) > _MAX_LABEL_CHARACTERS:
        raise ParameterError(
            param, f"{param} must have at most {_MAX_LABEL_CHARACTERS} characters."
        )
    return value


def _check_stream(request: ChatCompletionRequest | CompletionRequest) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise ParameterError("prompt_logprobs", "prompt_logprobs is not allowed with stream: true.")
    if request.stream_options is None:
        return
    if not request.stream:
        raise ParameterError("stream_options", "stream_options needs stream: true.")
    options = request.stream_options
    if options.continuous_usage_stats and not options.include_usage:
        raise ParameterError(
            "stream_options.continuous_usage_stats",
            "stream_options.continuous_usage_stats needs include_usage: true.",
        )
    refuse_unhonoured(options, NEUTRAL, "stream_options.")
