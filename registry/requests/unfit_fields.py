"""Fields that a beam search or a WebSocket does not support, by the clients' names."""

from __future__ import annotations

from millrace.registry.requests.grammar_fields import grammar_field
from millrace.registry.requests.offered.offered_tools import OfferedTools
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from millrace.schemas.websocket import Generate


def check_socket_fields(message: Generate) -> None:
    """Raise ParameterError for a field that is unsupported over a WebSocket; names the field."""
    options = message.stream_options or StreamOptions()
    for name, given in (
        ("prompt_logprobs", message.prompt_logprobs is not None),
        ("use_beam_search", message.use_beam_search),
        ("return_token_ids", message.return_token_ids),
        ("stream_options.continuous_usage_stats", options.continuous_usage_stats),
    ):
        if given:
            raise ParameterError(
                name,
                f"{name} is not supported over a WebSocket. Remove it, or send the request to "
                "/v1/chat/completions.",
            )


# Fields that demand something only if they are true or not empty.
_CHAT_FIELDS = ("logprobs", "top_logprobs", "server_tools")


def check_beam_search(request: GenerationFields) -> None:
    """Raise ParameterError, naming the field, for a field that ``SamplingOptions`` has under
    another name or not at all.
    """
    if not request.use_beam_search:
        return
    if isinstance(request, ChatCompletionRequest | CompletionRequest) and request.stream:
        raise ParameterError(
            "stream",
            "stream: true is not allowed with use_beam_search: the answers come at the end.",
        )
    field = grammar_field(request)
    if field is not None:
        raise _refusal(field)
    if isinstance(request, ChatFields):
        _check_chat(request)


def _check_chat(request: ChatFields) -> None:
    for name in _CHAT_FIELDS:
        if getattr(request, name):
            raise _refusal(name)
    if request.thinking_token_budget is not None:
        raise _refusal("thinking_token_budget")
    # Each of these constrains the answer by a grammar.
    if request.tool_choice not in (None, "auto", "none"):
        raise ParameterError(
            "tool_choice", "With use_beam_search tool_choice must be auto or none."
        )
    if request.tools and request.parallel_tool_calls is False:
        raise _refusal("parallel_tool_calls: false")


def check_tools_of_beam_search(offered: OfferedTools) -> None:
    """Raise ParameterError for tools that constrain the answer by a grammar."""
    if any(tool.strict for tool in offered.tools):
        raise _refusal("tools", "A strict tool")
    if any(offered.freeform.values()):
        raise _refusal("tools", "A custom tool with a grammar")


def _refusal(field: str, what: str = "") -> ParameterError:
    param = field.partition(":")[0]
    return ParameterError(param, f"{what or field} is not allowed with use_beam_search: true.")
