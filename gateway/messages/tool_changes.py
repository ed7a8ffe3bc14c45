"""Which tools a Messages request offers to the model, as its history adds and removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from millrace.registry.requests.decoding import decode
from millrace.schemas.anthropic.blocks import ToolAdditionBlock, ToolChange
from millrace.schemas.anthropic.requests import MessagesTool
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice, NoticeCode, notice

_TOOL = msgspec.json.Decoder(MessagesTool)
# Only the provider's server can run this search, so no search would find deferred tools here.
_SERVER_SEARCH = "tool_search_tool"


class HistoryTools:
    """The tools of a request. A tool with ``defer_loading`` is offered once the history refers to
    it. Such tools are offered from the start if nothing else is, or if only the provider's search
    could find them. ``notices`` name the tools that the history adds and that are not here."""

    def __init__(self, tools: Sequence[MessagesTool]) -> None:
        self.notices: list[Notice] = []
        self._tools = [(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
        self._defined: dict[str, tuple[str, MessagesTool]] = {}
        has_search = any((tool.type or "").startswith(_SERVER_SEARCH) for tool in tools)
        own = [tool for tool in tools if tool.type in (None, "custom")]
        deferred = {tool.name for tool in own if tool.defer_loading}
        self._hidden = set() if has_search or len(deferred) == len(own) else deferred
        self._removed: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, MessagesTool]]:
        """The tools that are offered in the end, each with its path."""
        given = [one for one in self._tools if one[1].name not in self._defined]
        left_out = self._hidden | self._removed
        for path, tool in (*given, *self._defined.values()):
            if tool.name not in left_out:
                yield path, tool

    def find(self, name: str, path: str) -> None:
        """A search has found a tool."""
        if self._has(name):
            self._hidden.discard(name)
        else:
            self.notices.append(notice(NoticeCode.TOOL_LEFT_OUT, path, name))

    def change(self, path: str, block: ToolChange) -> None:
        """Add or remove a tool. Raises ParameterError for an unknown tool."""
        path = f"{path}.tool"
        kind = block.tool.get("type")
        if kind in ("mcp_tool_reference", "mcp_toolset_reference"):
            name = block.tool.get("name") or block.tool.get("server_name")
            self.notices.append(notice(NoticeCode.TOOL_LEFT_OUT, path, str(name)))
            return
        if kind == "tool_definition" and isinstance(block, ToolAdditionBlock):
            tool = _definition(f"{path}.definition", block.tool.get("definition"))
            self._defined[tool.name] = (f"{path}.definition", tool)
            name = tool.name
        elif kind == "tool_reference":
            name = self._referenced(path, block.tool.get("name"))
        else:
            raise ParameterError(
                f"{path}.type",
                f"{path}.type: a {block.type} block cannot have the type {kind!r:.100}.",
            )
        if isinstance(block, ToolAdditionBlock):
            self._hidden.discard(name)
            self._removed.discard(name)
        else:
            self._removed.add(name)

    def _has(self, name: str) -> bool:
        return name in self._defined or any(tool.name == name for _, tool in self._tools)

    def _referenced(self, path: str, name: Any) -> str:
        if not isinstance(name, str) or not self._has(name):
            raise ParameterError(
                f"{path}.name",
                f"{path}.name: there is no tool {name!r:.100} in tools or in an earlier block.",
            )
        return name


def _definition(path: str, definition: Any) -> MessagesTool:
    try:
        return decode(_TOOL, msgspec.json.encode(definition))
    except ParameterError as error:
        where = f"{path}.{error.param}" if error.param else path
        raise ParameterError(where, f"{path}: {error.message}") from error
