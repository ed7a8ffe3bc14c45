"""Blocks of content in the history of a Messages request.

Clients send back blocks with all fields that an SDK keeps, so unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.chat.messages import TextPart


class _Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


# --- texts -----------------------------------------------------------------------------------


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    """Piece of text of a turn."""

    text: str


class SearchResultBlock(_Block, frozen=True, kw_only=True, tag="search_result"):
    """Result of the client's own search. The model reads title, source and text."""

    source: str
    title: str
    content: tuple[TextPart, ...]


class DocumentBlock(_Block, frozen=True, kw_only=True, tag="document"):
    """Document. Its ``source`` must have the type ``text`` or ``content``."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None


class ToolReferenceBlock(_Block, frozen=True, kw_only=True, tag="tool_reference"):
    """Reference to the tool ``tool_name`` that a search found. The model sees the tool from then
    on."""

    tool_name: str


class BrowserStateBlock(_Block, frozen=True, kw_only=True, tag="browser_state"):
    """Tabs of the client's browser. The model reads them as JSON."""

    tabs: tuple[dict[str, Any], ...]
    state_changes: tuple[dict[str, Any], ...] | None = None


class ImageBlock(_Block, frozen=True, kw_only=True, tag="image"):
    """Image. In a tool result and in an answer the model reads a sentence in its place."""


ReadableBlock = (
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock | BrowserStateBlock
)


# --- calls that the client runs ----------------------------------------------------------------


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    """Tool call by the model. ``input`` is an object. A truncated call may have an empty input or a
    string of partial JSON."""

    id: str
    name: str
    input: dict[str, Any] | str | None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    """Result of the call ``tool_use_id``, or its error with ``is_error``."""

    tool_use_id: str
    content: str | tuple[ReadableBlock | ImageBlock, ...] | None = None
    is_error: bool | None = None


# --- calls that a provider's server ran ----------------------------------------------------------


class ServerToolUseBlock(_Block, frozen=True, kw_only=True, tag="server_tool_use"):
    """Call that the provider's server ran. Its result follows in the history."""

    id: str
    name: str
    input: dict[str, Any] = {}


class McpToolUseBlock(_Block, frozen=True, kw_only=True, tag="mcp_tool_use"):
    """Call that the provider's server sent to the MCP server ``server_name``."""

    id: str
    name: str
    server_name: str = ""
    input: dict[str, Any] = {}


class _ServerResult(_Block, frozen=True, kw_only=True):
    """Result of the call ``tool_use_id``. The model reads it as text or as JSON."""

    tool_use_id: str
    content: Any = None
    is_error: bool | None = None


class WebSearchResult(_ServerResult, frozen=True, kw_only=True, tag="web_search_tool_result"):
    pass


class WebFetchResult(_ServerResult, frozen=True, kw_only=True, tag="web_fetch_tool_result"):
    pass


class CodeResult(_ServerResult, frozen=True, kw_only=True, tag="code_execution_tool_result"):
    pass


class BashResult(_ServerResult, frozen=True, kw_only=True, tag="bash_code_execution_tool_result"):
    pass


class EditorResult(
    _ServerResult, frozen=True, kw_only=True, tag="text_editor_code_execution_tool_result"
):
    pass


class ToolSearchResult(_ServerResult, frozen=True, kw_only=True, tag="tool_search_tool_result"):
    """Result of a tool search. The model sees the found tools from then on."""


class AdvisorResult(_ServerResult, frozen=True, kw_only=True, tag="advisor_tool_result"):
    pass


class McpResult(_ServerResult, frozen=True, kw_only=True, tag="mcp_tool_result"):
    pass


ServerCall = ServerToolUseBlock | McpToolUseBlock
ServerResult = (
    WebSearchResult
    | WebFetchResult
    | CodeResult
    | BashResult
    | EditorResult
    | ToolSearchResult
    | AdvisorResult
    | McpResult
)


# --- added and removed tools ---------------------------------------------------------------------


class ToolAdditionBlock(_Block, frozen=True, kw_only=True, tag="tool_addition"):
    """Tool that the model sees from this turn on. It is named in the request's ``tools`` or defined
    by ``tool.definition``."""

    tool: dict[str, Any]


class ToolRemovalBlock(_Block, frozen=True, kw_only=True, tag="tool_removal"):
    """Tool that the model no longer sees from this turn on."""

    tool: dict[str, Any]


ToolChange = ToolAdditionBlock | ToolRemovalBlock


# --- thoughts and provider notes ----------------------------------------------------------------


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """Thoughts of the model. ``signature`` is ignored."""

    thinking: str
    signature: str | None = None


class CompactionBlock(_Block, frozen=True, kw_only=True, tag="compaction"):
    """Summary that replaces all messages before it; null: no summary. ``tool_changes`` are the tool
    changes in those messages."""

    content: str | None = None
    encrypted_content: str | None = None
    tool_changes: tuple[ToolChange, ...] | None = None


class RedactedThinkingBlock(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Encrypted thoughts."""


class FallbackBlock(_Block, frozen=True, kw_only=True, tag="fallback"):
    """Mark of a model change by the provider."""


class McpToolListingBlock(_Block, frozen=True, kw_only=True, tag="mcp_tool_listing"):
    """Tools of an MCP server that the provider's server called."""


class ContainerUploadBlock(_Block, frozen=True, kw_only=True, tag="container_upload"):
    """File in the provider's container."""


UnreadableBlock = RedactedThinkingBlock | FallbackBlock | McpToolListingBlock | ContainerUploadBlock

ContentBlock = (
    TextBlock
    | ImageBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerCall
    | ServerResult
    | ToolChange
    | ThinkingBlock
    | CompactionBlock
    | UnreadableBlock
)
