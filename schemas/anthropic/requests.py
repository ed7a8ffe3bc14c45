"""Requests of Anthropic's Messages API.

An unknown field of the request raises an error that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from millrace.schemas.anthropic.blocks import ContentBlock
from millrace.schemas.chat.messages import TextPart

ROLES = ("user", "assistant", "system")


class TurnOutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Output options of one turn. ``effort`` applies to the answer to this turn."""

    effort: str | None = None


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Turn of the conversation. ``clear_at`` and ``output_config`` belong to system turns: with
    ``next_user_message`` the model reads the turn's text only until the next user turn."""

    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | tuple[ContentBlock, ...] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutputConfig | None = None


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool that the client runs. ``input_schema`` is the JSON Schema of its input, an object. Tools
    of other types than ``custom`` have no schema: the client's ``bash``, ``text_editor`` and
    ``memory`` have a known input, and tools that only Anthropic's server can run are left out. The
    fields after ``strict``, and all fields of left-out tools, have no effect."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    allowed_callers: tuple[str, ...] | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: tuple[dict[str, Any], ...] | None = None
    allowed_domains: Any = None
    blocked_domains: Any = None
    caching: Any = None
    citations: Any = None
    configs: Any = None
    default_config: Any = None
    display_height_px: Any = None
    display_number: Any = None
    display_width_px: Any = None
    enable_zoom: Any = None
    max_characters: Any = None
    max_content_tokens: Any = None
    max_tokens: Any = None
    max_uses: Any = None
    mcp_server_name: Any = None
    model: Any = None
    response_inclusion: Any = None
    tools: Any = None
    url_sources: Any = None
    use_cache: Any = None
    user_location: Any = None


# Fields of tools of other types than ``custom``.
OF_PROVIDER_TOOLS = MessagesTool.__struct_fields__[
    MessagesTool.__struct_fields__.index("allowed_domains") :
]


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool choice. ``any``: the model must call some tool. ``tool``: the model must call the tool
    ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thinking of the model before its answer: on or off, its budget in tokens (``budget_tokens``,
    a maximum), and the display of its thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON Schema that the answer's text matches."""

    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output options. ``effort`` is called ``reasoning_effort`` in chat completions."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a request. ``user_id`` is recorded as the request's user."""

    user_id: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages``, and without ``max_tokens`` of ``POST
    /v1/messages/count_tokens``.

    ``service_tier`` takes the names of chat completions, or Anthropic's ``standard_only``.
    ``cache_control``, ``context_management``, ``diagnostics``, ``inference_geo`` and ``speed`` are
    hints without effect; ``container`` and ``mcp_servers`` are known but not supported.
    """

    model: str
    messages: tuple[GivenMessage, ...]
    max_tokens: int | None = None
    system: str | tuple[TextPart, ...] | None = None
    stream: bool | None = None
    stop_sequences: tuple[str, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: tuple[MessagesTool, ...] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    container: Any = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    mcp_servers: Any = None
    speed: str | None = None
