"""The tools of a chat completion, as OpenAI's clients write them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.gateway.request.freeform_tools import CUSTOM, freeform_tool
from millrace.gateway.request.offered_tools import (
    GivenTool,
    OfferedTools,
    asked_choice,
    offered_tools,
    own_tools,
    tool_left_out,
)
from millrace.gateway.transport.decoding import decode
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import ChatFields, CustomGrammarFormat, CustomTool, FunctionTool
from millrace.schemas.tools import ToolDefinition

FUNCTION = "function"


class ToolHead(msgspec.Struct, frozen=True):
    """What a tool of any type begins with."""

    type: str = FUNCTION
    name: str = ""
    server_label: str = ""


HEAD = msgspec.json.Decoder(ToolHead)
_FUNCTION = msgspec.json.Decoder(FunctionTool)
_CUSTOM = msgspec.json.Decoder(CustomTool)


def offered_of_chat(request: ChatFields) -> OfferedTools:
    """Raises ParameterError, naming the tool, for what cannot be honoured."""
    given = [*given_tools(request.tools or ()), *own_tools(request.server_tools or ())]
    return offered_tools(given, asked_choice(request.tool_choice))


def given_tools(tools: Sequence[msgspec.Raw]) -> list[GivenTool]:
    """Raises ParameterError."""
    return [_given(bytes(raw), f"tools[{i}]") for i, raw in enumerate(tools)]


def _given(raw: bytes, where: str) -> GivenTool:
    try:
        head = decode(HEAD, raw)
        if head.type == FUNCTION:
            return _function(decode(_FUNCTION, raw), where)
        if head.type == CUSTOM:
            return _custom(decode(_CUSTOM, raw), where)
    except ParameterError as error:
        raise within(error, where) from error
    left_out = tool_left_out(head.type, where, head.name or head.server_label)
    if left_out is None:
        raise unknown_type(head.type, where, (FUNCTION, CUSTOM))
    return left_out


def within(error: ParameterError, where: str) -> ParameterError:
    """The refusal of a part of the request's field ``where``. A refusal of a tool's name is the
    whole field's."""
    if error.param == "tools" or error.param.startswith(where):
        return error
    path = f"{where}.{error.param}" if error.param else where
    if error.param and error.message.startswith(error.param):
        return ParameterError(path, f"{where}.{error.message}")
    return ParameterError(path, f"{where}: {error.message}")


def unknown_type(tool_type: str, where: str, known: Sequence[str]) -> ParameterError:
    """The refusal of a tool of a type that is not known."""
    return ParameterError(
        f"{where}.type",
        f"{where}.type: {tool_type!r:.100} is no type of tool that is known here; give one of "
        f"{', '.join(known)}.",
    )


def _function(tool: FunctionTool, where: str) -> GivenTool:
    function = tool.function
    return GivenTool(
        where=where,
        type=FUNCTION,
        name=function.name,
        definition=ToolDefinition(
            name=function.name,
            description=function.description or "",
            parameters=function.parameters,
            strict=bool(function.strict),
        ),
    )


def _custom(tool: CustomTool, where: str) -> GivenTool:
    custom = tool.custom
    grammar = custom.format.grammar if isinstance(custom.format, CustomGrammarFormat) else None
    return freeform_tool(
        where,
        custom.name,
        custom.description or "",
        syntax="" if grammar is None else grammar.syntax,
        definition="" if grammar is None else grammar.definition,
        definition_field=f"{where}.custom.format.grammar.definition",
    )
