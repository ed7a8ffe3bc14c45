"""The tools of a chat completion, as OpenAI's clients write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from millrace.registry.requests.decoding import decode
from millrace.registry.requests.offered.freeform_tools import CUSTOM, freeform_tool
from millrace.registry.requests.offered.offered_tools import (
    GivenTool,
    OfferedTools,
    asked_choice,
    offered_tools,
    own_tools,
    tool_left_out,
)
from millrace.schemas.chat.tools import CustomGrammarFormat, CustomTool, FunctionTool
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import ChatFields
from millrace.schemas.tools import ToolDefinition, check_tool_name

_T = TypeVar("_T")
FUNCTION = "function"


class ToolHead(msgspec.Struct, frozen=True):
    """The fields that tools of all types have: the type, and the name or label."""

    type: str
    name: str | None = None
    server_label: str | None = None

    def left_out(self, where: str) -> GivenTool | None:
        """Return the tool if its type is left out, else None."""
        return tool_left_out(self.type, where, self.name or self.server_label or "")


class _ChatHead(ToolHead, frozen=True):
    """A tool without a ``type`` is a function."""

    type: str = FUNCTION


_HEAD = msgspec.json.Decoder(_ChatHead)
_FUNCTION = msgspec.json.Decoder(FunctionTool)
_CUSTOM = msgspec.json.Decoder(CustomTool)


def offered_of_chat(request: ChatFields) -> OfferedTools:
    """Read the tools and ``tool_choice`` of a chat request. Raises ParameterError, which names the
    tool, for what cannot be honoured."""
    given = [*given_tools(request.tools or ()), *own_tools(request.server_tools or ())]
    return offered_tools(given, asked_choice(request.tool_choice))


def given_tools(tools: Sequence[msgspec.Raw]) -> list[GivenTool]:
    """Read the tools of a chat request. Raises ParameterError."""
    return [_given(bytes(raw), f"tools[{i}]") for i, raw in enumerate(tools)]


def _given(raw: bytes, where: str) -> GivenTool:
    head = decode_within(where, _HEAD, raw)
    if head.type == FUNCTION:
        return _function(decode_within(where, _FUNCTION, raw), where)
    if head.type == CUSTOM:
        return _custom(decode_within(where, _CUSTOM, raw), where)
    left_out = head.left_out(where)
    if left_out is None:
        raise unknown_type(head.type, where, (FUNCTION, CUSTOM))
    return left_out


def decode_within(where: str, decoder: msgspec.json.Decoder[_T], raw: bytes) -> _T:
    """Decode the value of the field ``where`` of a request. Raises ParameterError, whose ``param``
    begins with ``where``."""
    try:
        return decode(decoder, raw)
    except ParameterError as error:
        path = f"{where}.{error.param}" if error.param else where
        is_named = bool(error.param) and error.message.startswith(error.param)
        message = f"{where}.{error.message}" if is_named else f"{where}: {error.message}"
        raise ParameterError(path, message) from error


def unknown_type(tool_type: str, where: str, known: Sequence[str]) -> ParameterError:
    """Make the refusal of a tool of an unknown type; ``known`` are the types that are taken."""
    return ParameterError(
        f"{where}.type",
        f"{where}.type: {tool_type!r:.100} is not a known type of tool; give one of "
        f"{', '.join(known)}.",
    )


def _function(tool: FunctionTool, where: str) -> GivenTool:
    function = tool.function
    check_tool_name(function.name, f"{where}.function.name")
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
    check_tool_name(custom.name, f"{where}.custom.name")
    grammar = custom.format.grammar if isinstance(custom.format, CustomGrammarFormat) else None
    return freeform_tool(
        where,
        custom.name,
        custom.description or "",
        syntax="" if grammar is None else grammar.syntax,
        definition="" if grammar is None else grammar.definition,
        definition_field=f"{where}.custom.format.grammar.definition",
    )
