"""Built-in tool calls of clients of the Responses API, and outputs of calls, converted for chat
completions.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from millrace.registry.tool_formats.freeform import arguments_of_input
from millrace.schemas.chat.messages import CalledFunction
from millrace.schemas.responses.call_items import (
    ApplyPatchCallItem,
    ApplyPatchCallOutputItem,
    BuiltInCallItem,
    CustomToolCallItem,
    ItemStatus,
    LocalShellCallItem,
    OtherCallItem,
    OtherOutputItem,
    ShellCallItem,
    ShellCallOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)

_EXEC = "exec"


class _LocalShellAction(msgspec.Struct):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None
    type: str = _EXEC


class _ShellAction(msgspec.Struct):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _PatchOperation(msgspec.Struct, omit_defaults=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""


class _Form(NamedTuple):
    """Encoding of the arguments in an item: the field, its decoder, and its empty value."""

    field: str
    decoder: msgspec.json.Decoder[Any]
    nothing: dict[str, Any]


_FORMS: dict[type[BuiltInCallItem], _Form] = {
    LocalShellCallItem: _Form(
        "action",
        msgspec.json.Decoder(_LocalShellAction),
        {"type": _EXEC, "command": [], "env": {}},
    ),
    ShellCallItem: _Form("action", msgspec.json.Decoder(_ShellAction), {"commands": []}),
    ApplyPatchCallItem: _Form("operation", msgspec.json.Decoder(_PatchOperation), {}),
    ToolSearchCallItem: _Form("arguments", msgspec.json.Decoder(dict[str, Any]), {}),
}


def built_in_item(
    kind: type[BuiltInCallItem], item_id: str, call_id: str, arguments: str, status: ItemStatus
) -> BuiltInCallItem:
    """Make the item of a call with these arguments. If the tool does not take the arguments, the
    item is ``incomplete`` and its action is empty."""
    form = _FORMS[kind]
    asked = form.nothing
    if status == "completed":
        try:
            asked = msgspec.to_builtins(form.decoder.decode(arguments))
        except (msgspec.DecodeError, RecursionError):
            status = "incomplete"
    fields: dict[str, Any] = {form.field: asked}
    return kind(id=item_id, call_id=call_id, status=status, **fields)


def asked_of(item: BuiltInCallItem) -> dict[str, Any]:
    """Return the arguments of the call that the item describes."""
    asked: dict[str, Any] = getattr(item, _FORMS[type(item)].field)
    return asked


def called(item: OtherCallItem) -> CalledFunction:
    """Return the call as the model made it, without the namespace of a custom tool."""
    if isinstance(item, CustomToolCallItem):
        return CalledFunction(name=item.name, arguments=arguments_of_input(item.input))
    if isinstance(item, LocalShellCallItem):
        given = {key: value for key, value in item.action.items() if key != "type"}
        name, arguments = "local_shell", {key: value for key, value in given.items() if value}
    elif isinstance(item, ShellCallItem):
        name = "shell"
        arguments = {key: value for key, value in item.action.items() if value is not None}
    elif isinstance(item, ApplyPatchCallItem):
        name, arguments = "apply_patch", item.operation
    else:
        name, arguments = "tool_search", item.arguments
    return CalledFunction(name=name, arguments=msgspec.json.encode(arguments).decode())


def told_output(item: OtherOutputItem) -> str:
    """Return the text of a call's output for the model."""
    if isinstance(item, ToolSearchOutputItem):
        names = ", ".join(filter(None, map(_names_of, item.tools)))
        return f"Found: {names}" if names else "Nothing was found."
    if isinstance(item, ApplyPatchCallOutputItem):
        return f"{item.status}: {item.output}" if item.output else item.status
    if isinstance(item, ShellCallOutputItem):
        return msgspec.json.encode(item.output).decode()
    output = item.output
    return output if isinstance(output, str) else "".join(piece.text for piece in output)


def _names_of(tool: dict[str, Any]) -> str:
    inner = tool.get("tools")
    if isinstance(inner, list):
        return ", ".join(str(one.get("name", "")) for one in inner if isinstance(one, dict))
    return str(tool.get("name", tool.get("type", "")))
