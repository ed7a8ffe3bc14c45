"""Calls of tools that the client runs, and their outputs, as items of a conversation.

Items that clients send back may have fields that an SDK or another server added: they are ignored.
A field with null counts as left out.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.chat.unreadable import InputAudio, InputFile, InputImage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    id: str = ""
    status: ItemStatus = "completed"


class _Call(_Item, frozen=True, kw_only=True):
    call_id: str = ""


class CustomToolCallItem(_Call, frozen=True, kw_only=True, tag="custom_tool_call"):
    """Call whose ``input`` is text."""

    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class LocalShellCallItem(_Call, frozen=True, kw_only=True, tag="local_shell_call"):
    """Call of the local shell. ``action``: ``{"type": "exec", "command": […], "env": {…}}``,
    optionally with ``working_directory``, ``timeout_ms`` and ``user``."""

    action: dict[str, Any]


class ShellCallItem(_Call, frozen=True, kw_only=True, tag="shell_call"):
    """Call of a shell. ``action``: ``{"commands": […]}``, optionally with ``timeout_ms`` and
    ``max_output_length``."""

    action: dict[str, Any]


class ApplyPatchCallItem(_Call, frozen=True, kw_only=True, tag="apply_patch_call"):
    """Call to change a file. ``operation``: ``{"type": "create_file", "path": …, "diff": …}``, or
    ``update_file``, or ``delete_file`` without ``diff``."""

    operation: dict[str, Any]


class ToolSearchCallItem(_Call, frozen=True, kw_only=True, tag="tool_search_call"):
    """Call to search the client's tools."""

    arguments: Any
    execution: Literal["server", "client"] = "client"


class OutputPiece(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Piece of a call's output."""

    text: str


class EchoedPiece(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Piece of a call's output, as text of an answer."""

    text: str


class CustomToolCallOutputItem(_Call, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    """Output of a call of a custom tool."""

    output: str | tuple[OutputPiece | EchoedPiece | InputImage | InputFile | InputAudio, ...] = ""


class LocalShellCallOutputItem(_Call, frozen=True, kw_only=True, tag="local_shell_call_output"):
    """Output of the command. Without a ``call_id``, ``id`` is the id of the call."""

    output: str = ""


class ShellCallOutputItem(_Call, frozen=True, kw_only=True, tag="shell_call_output"):
    """Outputs of the commands: objects of ``stdout``, ``stderr`` and ``outcome``."""

    output: tuple[dict[str, Any], ...]
    max_output_length: int | None = None


class ApplyPatchCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="apply_patch_call_output"
):
    """Result of a change to a file, with an optional text."""

    id: str = ""
    call_id: str = ""
    status: Literal["completed", "failed"] = "completed"
    output: str = ""


class ToolSearchOutputItem(_Call, frozen=True, kw_only=True, tag="tool_search_output"):
    """Tools found by a search. The model sees them from then on."""

    tools: tuple[dict[str, Any], ...]
    execution: Literal["server", "client"] = "client"


class AdditionalToolsItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="additional_tools"
):
    """Tools that the model is told of in addition to the tools of the request."""

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
