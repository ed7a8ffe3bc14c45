"""Tools of a chat completion, in the form of OpenAI's clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from millrace.registry.requests.decoding import decode
from millrace.registry.requests.offered.offered_tools import (
    GivenTool,
    OfferedTools,
    asked_choice,
    offered_tools,
    own_tools,
    tool_left_out,
)
from millrace.registry.tool_formats.freeform import PARAMETERS
from millrace.registry.tool_formats.lark.grammar import pattern_of_lark, pattern_of_regex
from millrace.registry.tool_formats.lark.plain_pattern import NoPatternError, NotKeptError
from millrace.registry.tool_formats.lark.reader import LarkSyntaxError
from millrace.schemas.chat.tools import CustomGrammarFormat, CustomTool, FunctionTool
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import NoticeCode, Notices, notice
from millrace.schemas.openai import ChatFields
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS
from millrace.schemas.tools import ToolDefinition, check_tool_name

CUSTOM = "custom"
_HINT = "Give the whole text as the one argument input."
_OF_SYNTAX = {
    "lark": "It must match this grammar in Lark's notation:",
    "regex": "It must match this regular expression:",
}


def freeform_tool(
    where: str,
    name: str,
    description: str,
    *,
    syntax: str = "",
    definition: str = "",
    definition_field: str = "",
    namespace: str = "",
    told_name: str = "",
) -> GivenTool:
    """Return a custom tool, with a grammar if there is a ``syntax``.

    The model knows the tool by ``told_name``, or by ``name`` if that is empty. A grammar that
    cannot be enforced is described to the model and named in a notice.

    Raises:
        ParameterError: the text is not a grammar.
    """
    told = [description.strip(), _HINT]
    pattern, notices = "", Notices()
    if syntax:
        told.append(f"{_OF_SYNTAX[syntax]}\n{definition}")
        pattern, notices = _pattern(syntax, definition, definition_field, name)
    return GivenTool(
        where=where,
        type=CUSTOM,
        name=name,
        namespace=namespace,
        definition=ToolDefinition(
            name=told_name or name,
            description="\n".join(filter(None, told)),
            parameters=PARAMETERS,
        ),
        pattern=pattern,
        notices=notices,
    )


def _pattern(syntax: str, definition: str, field: str, name: str) -> tuple[str, Notices]:
    if not 1 <= len(definition) <= MAX_GRAMMAR_CHARACTERS:
        raise ParameterError(field, f"{field} must have 1 to {MAX_GRAMMAR_CHARACTERS} characters.")
    try:
        if syntax == "lark":
            return pattern_of_lark(definition), ()
        return pattern_of_regex(definition), ()
    except (LarkSyntaxError, NoPatternError) as error:
        raise ParameterError(field, f"{field} cannot be read: {error}.") from error
    except NotKeptError as error:
        return "", (notice(NoticeCode.GRAMMAR_NOT_KEPT, field, f"{name}: {error}"),)


_T = TypeVar("_T")
FUNCTION = "function"


class ToolHead(msgspec.Struct, frozen=True):
    """Fields that tools of all types have: the type, and the name or label."""

    type: str
    name: str | None = None
    server_label: str | None = None

    def left_out(self, where: str) -> GivenTool | None:
        """Return the tool if its type is left out, else None."""
        return tool_left_out(self.type, where, self.name or self.server_label or "")


class _ChatHead(ToolHead, frozen=True):
    """Head of a chat tool; without a ``type`` it is a function."""

    type: str = FUNCTION


_HEAD = msgspec.json.Decoder(_ChatHead)
_FUNCTION = msgspec.json.Decoder(FunctionTool)
_CUSTOM = msgspec.json.Decoder(CustomTool)


def offered_of_chat(request: ChatFields) -> OfferedTools:
    """Return the tools and ``tool_choice`` of a chat request. Raises ParameterError, naming the
    tool, for unsupported ones.
    """
    given = [*given_tools(request.tools or ()), *own_tools(request.server_tools or ())]
    return offered_tools(given, asked_choice(request.tool_choice))


def given_tools(tools: Sequence[msgspec.Raw]) -> list[GivenTool]:
    """Return the tools of a chat request. Raises ParameterError."""
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
    """Decode the value of the field ``where`` of a request. Raises ParameterError whose ``param``
    begins with ``where``.
    """
    try:
        return decode(decoder, raw)
    except ParameterError as error:
        path = f"{where}.{error.param}" if error.param else where
        is_named = bool(error.param) and error.message.startswith(error.param)
        message = f"{where}.{error.message}" if is_named else f"{where}: {error.message}"
        raise ParameterError(path, message) from error


def unknown_type(tool_type: str, where: str, known: Sequence[str]) -> ParameterError:
    """Return the error for a tool of an unknown type; ``known`` are the supported types."""
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
