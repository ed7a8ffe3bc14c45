"""Calls of tools that the client runs, and what they gave, as items of a conversation.

Items that are sent back may have fields that an SDK or another server added: these are ignored.
Null is a field that is not there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    id: str = ""
    status: ItemStatus = "completed"


class _Call(_Item, frozen=True, kw_only=True):
    call_id: str = ""


class CustomToolCallItem(_Call, frozen=True, kw_only=True, tag="custom_tool_call"):
    """A call whose ``input`` is text."""

    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class LocalShellCallItem(_Call, frozen=True, kw_only=True, tag="local_shell_call"):
    """``action``: ``{"type": "exec", "command": […], "env": {…}}``, maybe with
    ``working_directory``, ``timeout_ms`` and ``user``."""

    action: dict[str, Any]


class ShellCallItem(_Call, frozen=True, kw_only=True, tag="shell_call"):
    """``action``: ``{"commands": […]}``, maybe with ``timeout_ms`` and ``max_output_length``."""

    action: dict[str, Any]


class ApplyPatchCallItem(_Call, frozen=True, kw_only=True, tag="apply_patch_call"):
    """``operation``: ``{"type": "create_file", "path": …, "diff": …}``, or ``update_file``, or
    ``delete_file`` without ``diff``."""

    operation: dict[str, Any]


class ToolSearchCallItem(_Call, frozen=True, kw_only=True, tag="tool_search_call"):
    """The client is to look for tools."""

    arguments: Any
    execution: Literal["server", "client"] = "client"


class OutputPiece(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """A piece of what a call gave."""

    text: str


class EchoedPiece(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A piece of what a call gave, as text of an answer."""

    text: str


class CustomToolCallOutputItem(_Call, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    """What a call of a custom tool gave."""

    output: str | tuple[OutputPiece | EchoedPiece, ...] = ""


class LocalShellCallOutputItem(_Call, frozen=True, kw_only=True, tag="local_shell_call_output"):
    """What the command gave. Without a ``call_id`` the ``id`` is the call's."""

    output: str = ""


class ShellCallOutputItem(_Call, frozen=True, kw_only=True, tag="shell_call_output"):
    """What the commands gave: objects of ``stdout``, ``stderr`` and ``outcome``."""

    output: tuple[dict[str, Any], ...]
    max_output_length: int | None = None


class ApplyPatchCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="apply_patch_call_output"
):
    """Whether the change was made, and maybe what was said of it."""

    id: str = ""
    call_id: str = ""
    status: Literal["completed", "failed"] = "completed"
    output: str = ""


class ToolSearchOutputItem(_Call, frozen=True, kw_only=True, tag="tool_search_output"):
    """The tools that were found: the model is told of them from here on."""

    tools: tuple[dict[str, Any], ...]
    execution: Literal["server", "client"] = "client"


class AdditionalToolsItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="additional_tools"
):
    """Tools that the model is told of beside those of the request."""

    tools: tuple[dict[str, Any], ...]
    id: str = ""
    role: Literal["developer"] = "developer"
    status: ItemStatus = "completed"


BuiltInCallItem = LocalShellCallItem | ShellCallItem | ApplyPatchCallItem | ToolSearchCallItem
OtherCallItem = CustomToolCallItem | BuiltInCallItem
OtherOutputItem = (
    CustomToolCallOutputItem
    | LocalShellCallOutputItem
    | ShellCallOutputItem
    | ApplyPatchCallOutputItem
    | ToolSearchOutputItem
)
OtherItem = OtherCallItem | OtherOutputItem | AdditionalToolsItem
