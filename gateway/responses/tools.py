"""Tools of a Responses request: their definitions for the model, and the kind of item of each
call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.registry.requests.decoding import decode
from millrace.registry.requests.offered.chat_tools import (
    CUSTOM,
    ToolHead,
    decode_within,
    freeform_tool,
    unknown_type,
)
from millrace.registry.requests.offered.offered_tools import (
    OWN,
    GivenTool,
    OfferedTools,
    asked_choice,
    offered_tools,
)
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.responses.call_items import (
    AdditionalToolsItem,
    ApplyPatchCallItem,
    BuiltInCallItem,
    LocalShellCallItem,
    ShellCallItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from millrace.schemas.responses.items import Item, ResponsesRequest
from millrace.schemas.responses.tools import (
    ApplyPatchTool,
    FlatCustomTool,
    FlatFunctionTool,
    FlatGrammarFormat,
    LocalShellTool,
    NamedServerTool,
    NamespaceTool,
    ResponseTool,
    ShellTool,
    ToolSearchTool,
)
from millrace.schemas.tools import ToolDefinition, check_tool_name

_HEAD = msgspec.json.Decoder(ToolHead)
_DECODERS: Mapping[str, msgspec.json.Decoder[ResponseTool]] = {
    "function": msgspec.json.Decoder(FlatFunctionTool),
    CUSTOM: msgspec.json.Decoder(FlatCustomTool),
    "namespace": msgspec.json.Decoder(NamespaceTool),
    "local_shell": msgspec.json.Decoder(LocalShellTool),
    "shell": msgspec.json.Decoder(ShellTool),
    "apply_patch": msgspec.json.Decoder(ApplyPatchTool),
    "tool_search": msgspec.json.Decoder(ToolSearchTool),
    OWN: msgspec.json.Decoder(NamedServerTool),
}
_IN_NAMESPACES = ("function", CUSTOM)
_PARAMETERS: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(
    dict[str, Any] | None
)
_MAX_NAME_CHARACTERS = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_TEXT: Mapping[str, Any] = {"type": "string"}
_TEXTS: Mapping[str, Any] = {"type": "array", "items": _TEXT}
_COUNT: Mapping[str, Any] = {"type": "integer"}


class CallKind(NamedTuple):
    """Kind of a call for the client: of a function, of a custom tool or of a ``built_in`` tool."""

    name: str
    namespace: str = ""
    built_in: type[BuiltInCallItem] | None = None


class _BuiltIn(NamedTuple):
    """Definition of a built-in tool, whose schema is in no request, and the item of its calls."""

    description: str
    parameters: dict[str, Any]
    item: type[BuiltInCallItem]


_BUILT_IN: Mapping[type[ResponseTool], _BuiltIn] = {
    LocalShellTool: _BuiltIn(
        "Run a command on the user's machine.",
        {
            "type": "object",
            "properties": {
                "command": {**_TEXTS, "description": "The program and its arguments."},
                "working_directory": _TEXT,
                "timeout_ms": _COUNT,
                "env": {"type": "object", "additionalProperties": _TEXT},
                "user": _TEXT,
            },
            "required": ["command"],
            "additionalProperties": False,
        },
        LocalShellCallItem,
    ),
    ShellTool: _BuiltIn(
        "Run commands in a shell on the user's machine.",
        {
            "type": "object",
            "properties": {
                "commands": {**_TEXTS, "description": "They may run at the same time."},
                "timeout_ms": _COUNT,
                "max_output_length": _COUNT,
            },
            "required": ["commands"],
            "additionalProperties": False,
        },
        ShellCallItem,
    ),
    ApplyPatchTool: _BuiltIn(
        "Create, change or delete one file.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": _TEXT,
                "diff": {**_TEXT, "description": "A unified diff; none to delete the file."},
            },
            "required": ["type", "path"],
            "additionalProperties": False,
        },
        ApplyPatchCallItem,
    ),
    ToolSearchTool: _BuiltIn(
        "Find tools for what is to be done.",
        {
            "type": "object",
            "properties": {"query": _TEXT},
            "required": ["query"],
            "additionalProperties": False,
        },
        ToolSearchCallItem,
    ),
}


def offered_of_responses(
    request: ResponsesRequest, items: Sequence[Item], paths: Sequence[str] = ()
) -> OfferedTools:
    """Return the definitions of the tools of a request and of its conversation. ``paths`` has the
    field of each item: it is empty for an item of an earlier request.

    Raises ParameterError, naming the tool, for a tool that cannot be honoured.
    """
    return offered_tools(_given_tools(request, items, paths), asked_choice(request.tool_choice))


def call_kinds(request: ResponsesRequest, items: Sequence[Item]) -> dict[str, CallKind]:
    """Return the kinds of an accepted request's calls, by the tools' names for the model."""
    return {
        tool.definition.name: CallKind(tool.name or tool.type, tool.namespace, _item_of(tool.type))
        for tool in _given_tools(request, items)
        if tool.definition is not None
    }


def told_name(name: str, namespace: str) -> str:
    """Return the model's name of a function in a namespace."""
    if not namespace:
        return name
    joint = "" if namespace.endswith("_") else "__"
    told = _NOT_IN_NAMES.sub("_", f"{namespace}{joint}{name}")
    if len(told) <= _MAX_NAME_CHARACTERS and told == f"{namespace}{joint}{name}":
        return told
    mark = hashlib.sha256(f"{namespace}\n{name}".encode()).hexdigest()[:8]
    return f"{told[: _MAX_NAME_CHARACTERS - 9]}_{mark}"


def _item_of(tool_type: str) -> type[BuiltInCallItem] | None:
    kinds = {kind.__struct_config__.tag: built_in.item for kind, built_in in _BUILT_IN.items()}
    return kinds.get(tool_type)


def _given_tools(
    request: ResponsesRequest, items: Sequence[Item], paths: Sequence[str] = ()
) -> list[GivenTool]:
    """Read the tools of the request and of its items. A later tool replaces an earlier tool with
    the same name."""
    given = _read(map(bytes, request.tools or ()), "tools")
    for item, path in zip(items, paths or ("",) * len(items), strict=True):
        if isinstance(item, ToolSearchOutputItem | AdditionalToolsItem):
            field = f"{path or type(item).__struct_config__.tag}.tools"
            found = _read(map(msgspec.json.encode, item.tools), field)
            names = {tool.definition.name for tool in found if tool.definition is not None}
            given = [
                tool
                for tool in given
                if tool.definition is None or tool.definition.name not in names
            ]
            given += found
    return given


def _read(tools: Iterable[bytes], field: str) -> list[GivenTool]:
    return [tool for i, raw in enumerate(tools) for tool in _given(raw, f"{field}[{i}]", _DECODERS)]


def _given(
    raw: bytes, where: str, known: Iterable[str], namespace: str = "", about: str = ""
) -> Iterator[GivenTool]:
    """Yield the tool, or all tools of a namespace. ``about`` precedes the tool's own
    description.
    """
    head = decode_within(where, _HEAD, raw)
    decoder = _DECODERS.get(head.type) if head.type in known else None
    if decoder is None:
        left_out = head.left_out(where)
        if left_out is None:
            raise unknown_type(head.type, where, tuple(known))
        yield left_out
        return
    tool = decode_within(where, decoder, raw)
    if _is_run_by_provider(tool):
        yield GivenTool(where=where, type=head.type)
    elif isinstance(tool, NamespaceTool):
        for i, inner in enumerate(tool.tools):
            # The description of the first tool begins with the namespace's description.
            about = "" if i else tool.description or ""
            path = f"{where}.tools[{i}]"
            yield from _given(bytes(inner), path, _IN_NAMESPACES, tool.name, about)
    else:
        yield _told(tool, head.type, where, namespace, about)


def _is_run_by_provider(tool: ResponseTool) -> bool:
    if isinstance(tool, ShellTool):
        return bool((tool.environment or {}).get("type", "local") != "local")
    return isinstance(tool, ToolSearchTool) and tool.execution == "server"


def _told(tool: ResponseTool, tool_type: str, where: str, namespace: str, about: str) -> GivenTool:
    if isinstance(tool, NamedServerTool):
        return GivenTool(where=where, type=OWN, name=tool.name)
    if isinstance(tool, FlatCustomTool | FlatFunctionTool):
        check_tool_name(told_name(tool.name, namespace), f"{where}.name")
    if isinstance(tool, FlatCustomTool):
        grammar = tool.format if isinstance(tool.format, FlatGrammarFormat) else None
        return freeform_tool(
            where,
            tool.name,
            _described(about, tool.description),
            syntax="" if grammar is None else grammar.syntax,
            definition="" if grammar is None else grammar.definition,
            definition_field=f"{where}.format.definition",
            namespace=namespace,
            told_name=told_name(tool.name, namespace),
        )
    if isinstance(tool, FlatFunctionTool):
        name, told = tool.name, told_name(tool.name, namespace)
        description = _described(about, tool.description)
        parameters = _parameters(tool.parameters, where)
        strict = bool(tool.strict)
    else:
        built_in = _BUILT_IN[type(tool)]
        name, told, strict = "", tool_type, False
        description, parameters = built_in.description, built_in.parameters
        if isinstance(tool, ToolSearchTool):
            description = tool.description or description
            parameters = _parameters(tool.parameters, where) or parameters
    definition = ToolDefinition(
        name=told, description=description, parameters=parameters, strict=strict
    )
    return GivenTool(
        where=where, type=tool_type, name=name, namespace=namespace, definition=definition
    )


def _described(about: str, description: str | None) -> str:
    return "\n\n".join(filter(None, (about, description)))


def _parameters(raw: msgspec.Raw, where: str) -> dict[str, Any] | None:
    field = f"{where}.parameters"
    try:
        return decode(_PARAMETERS, bytes(raw))
    except MillraceError as error:
        raise ParameterError(field, f"{field}: {error.message}") from error
