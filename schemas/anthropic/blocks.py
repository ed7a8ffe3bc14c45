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
    """A piece of text of a turn."""

    text: str


class SearchResultBlock(_Block, frozen=True, kw_only=True, tag="search_result"):
    """A result of the client's own search. The model reads title, source and text."""

    source: str
    title: str
    content: tuple[TextPart, ...]


class DocumentBlock(_Block, frozen=True, kw_only=True, tag="document"):
    """A document. Its ``source`` must have the type ``text`` or ``content``."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None


class ToolReferenceBlock(_Block, frozen=True, kw_only=True, tag="tool_reference"):
    """A search found the tool ``tool_name``. The model is told of the tool from then on."""

    tool_name: str


class BrowserStateBlock(_Block, frozen=True, kw_only=True, tag="browser_state"):
    """The tabs of the client's browser. The model reads them as JSON."""

    tabs: tuple[dict[str, Any], ...]
    state_changes: tuple[dict[str, Any], ...] | None = None


class ImageBlock(_Block, frozen=True, kw_only=True, tag="image"):
    """An image. In a tool's result and in an answer the model reads a sentence in its place."""


ReadableBlock = (
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock | BrowserStateBlock
)


# --- calls that the client runs ----------------------------------------------------------------


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call that the model made. ``input`` is an object. Of a call that was cut it may be empty
    or a string of partial JSON."""

    id: str
    name: str
    input: dict[str, Any] | str | None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    """The result of the call ``tool_use_id``, or its error with ``is_error``."""

    tool_use_id: str
    content: str | tuple[ReadableBlock | ImageBlock, ...] | None = None
    is_error: bool | None = None


# --- calls that a provider's server ran ----------------------------------------------------------


class ServerToolUseBlock(_Block, frozen=True, kw_only=True, tag="server_tool_use"):
    """A call that the provider's server ran. Its result follows in the history."""

    id: str
    name: str
    input: dict[str, Any] = {}


class McpToolUseBlock(_Block, frozen=True, kw_only=True, tag="mcp_tool_use"):
    """A call that the provider's server sent to the MCP server ``server_name``."""

    id: str
    name: str
    server_name: str = ""
    input: dict[str, Any] = {}


class _ServerResult(_Block, frozen=True, kw_only=True):
    """The result of the call ``tool_use_id``. The model reads it as text or as JSON."""

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
    """The result of a search for tools. The model is told of the found tools from then on."""


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


# --- tools that come and go ----------------------------------------------------------------------


class ToolAdditionBlock(_Block, frozen=True, kw_only=True, tag="tool_addition"):
    """From here on the model is told of a tool: one of the request's ``tools`` by its name, or one
    that ``tool.definition`` defines."""

    tool: dict[str, Any]


class ToolRemovalBlock(_Block, frozen=True, kw_only=True, tag="tool_removal"):
    """From here on the model is not told of a tool."""

    tool: dict[str, Any]


ToolChange = ToolAdditionBlock | ToolRemovalBlock


# --- thoughts, and what a provider notes ---------------------------------------------------------


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """Thoughts of the model. ``signature`` is ignored."""

    thinking: str
    signature: str | None = None


class CompactionBlock(_Block, frozen=True, kw_only=True, tag="compaction"):
    """A summary in place of all messages before it; null: no summary. ``tool_changes`` are the
    changes of tools in those messages."""

    content: str | None = None
    encrypted_content: str | None = None
    tool_changes: tuple[ToolChange, ...] | None = None


class RedactedThinkingBlock(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Encrypted thoughts."""


class FallbackBlock(_Block, frozen=True, kw_only=True, tag="fallback"):
    """The provider changed the model here."""


class McpToolListingBlock(_Block, frozen=True, kw_only=True, tag="mcp_tool_listing"):
    """The tools of an MCP server that the provider's server asked."""


class ContainerUploadBlock(_Block, frozen=True, kw_only=True, tag="container_upload"):
    """A file in the provider's container."""


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
