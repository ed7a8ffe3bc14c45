"""What clients of Anthropic's Messages API send.

An unknown field of the request is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from millrace.schemas.anthropic.blocks import ContentBlock
from millrace.schemas.chat.messages import TextPart

ROLES = ("user", "assistant", "system")


class TurnOutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``effort`` is for the answer to this turn."""

    effort: str | None = None


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the conversation. ``clear_at`` and ``output_config`` are a system's turn's: with
    ``next_user_message`` the model reads its text only until the user's next turn."""

    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | tuple[ContentBlock, ...] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutputConfig | None = None


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. ``input_schema`` is the JSON Schema of its input, an object.
    Tools of other types than ``custom`` have none: the client's ``bash``, ``text_editor`` and
    ``memory``, whose input is known, and tools that only Anthropic's server can run, which are left
    out. The fields after ``strict`` are hints, which change nothing here, and fields of tools that
    are left out."""

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


# Fields that only tools of other types than ``custom`` have.
OF_PROVIDER_TOOLS = MessagesTool.__struct_fields__[
    MessagesTool.__struct_fields__.index("allowed_domains") :
]


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``any``: the model must call some tool; ``tool``: the one that ``name`` says."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a model that can think before it answers does so, for ``budget_tokens`` tokens at
    most, and whether its thoughts are told."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON Schema that the text of the answer matches."""

    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is what chat completions call ``reasoning_effort``."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``user_id`` stands in the records as whose request it was."""

    user_id: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``, and without ``max_tokens`` also ``POST /v1/messages/count_tokens``.

    ``service_tier`` is a name of chat completions or Anthropic's ``standard_only``.
    ``cache_control``, ``context_management``, ``diagnostics``, ``inference_geo`` and ``speed`` are
    hints that change nothing here; ``container`` and ``mcp_servers`` are known but not honoured.
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
