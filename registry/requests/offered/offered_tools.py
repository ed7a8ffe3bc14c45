"""Offered tools: the tools of a request that the model knows, and whether it must call one.

Endpoints spell tools in different ways; this rule is the same for all of them. A tool that only its
provider's server can run is left out, and the answer has a notice. A request that demands such a
tool is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.registry.requests.offered.provider_tools import is_left_out, why_left_out
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice, NoticeCode, Notices, bounded, notice
from millrace.schemas.tools import MAX_TOOLS, ToolChoice, ToolDefinition, ToolMode

OWN = "server"
_NAMESPACE = "namespace"
_CHOICE = "tool_choice"
_FORMS = (
    "tool_choice must be auto, none, required, an object that names a tool, or one of type "
    "allowed_tools with a mode and tools."
)
_WORDS = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "required": ToolMode.REQUIRED}
_REFERENCE_KEYS = frozenset({"type", "name", "namespace", "server_label"})
_MAX_REFERENCES = 4 * MAX_TOOLS


class GivenTool(msgspec.Struct, frozen=True, kw_only=True):
    """Tool of a request, in the field ``where``.

    ``tool_choice`` refers to it by its ``type`` and its ``name``, if it has one. ``definition`` is
    the model's description of it; None for a tool of the gateway's own and for a tool that is left
    out. With a ``pattern`` its input is text that matches this regular expression; empty: any text.
    """

    where: str
    type: str
    name: str = ""
    namespace: str = ""
    definition: ToolDefinition | None = None
    pattern: str | None = None
    notices: Notices = ()


class ToolReference(NamedTuple):
    """Reference to a tool in ``tool_choice``; an empty type or namespace matches all."""

    type: str = ""
    name: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        return self.name or self.type


class AskedChoice(NamedTuple):
    """Requested ``tool_choice``.

    ``named`` is set in the mode NAMED only. The model may call the tools in ``allowed`` (None: all
    tools), which come from the field ``where``.
    """

    mode: ToolMode = ToolMode.AUTO
    named: ToolReference = ToolReference()
    allowed: tuple[ToolReference, ...] | None = None
    where: str = _CHOICE


class OfferedTools(NamedTuple):
    """Tools that the model knows: the client's ``tools`` and the names of the gateway's ``own``.
    ``freeform`` has the patterns of tools whose input is text.
    """

    tools: tuple[ToolDefinition, ...]
    own: tuple[str, ...]
    choice: ToolChoice
    freeform: dict[str, str]
    notices: Notices


def tool_left_out(tool_type: str, where: str, name: str = "") -> GivenTool | None:
    """Return the tool if only its provider's server can run its type; else None."""
    if not is_left_out(tool_type):
        return None
    return GivenTool(where=where, type=tool_type, name=name)


def own_tools(names: Sequence[str]) -> list[GivenTool]:
    """Return the gateway's own tools that a request lists in ``server_tools``."""
    return [GivenTool(where="server_tools", type=OWN, name=name) for name in dict.fromkeys(names)]


def offered_tools(given: Sequence[GivenTool], asked: AskedChoice) -> OfferedTools:
    """Choose the tools that the model knows.

    Raises:
        ParameterError: two tools have one name, or the choice is an unknown tool or demands a tool
            that is left out.
    """
    _check(given)
    allowed = given if asked.allowed is None else _allowed(given, asked)
    choice = ToolChoice(mode=asked.mode)
    if asked.mode is ToolMode.NAMED:
        choice = ToolChoice(mode=ToolMode.NAMED, name=_named(given, asked.named))
    elif asked.mode is ToolMode.REQUIRED:
        _check_there_is_one(allowed)
    notices: list[Notice] = []
    for tool in given:
        if tool.definition is None and tool.type != OWN:
            notices.append(notice(NoticeCode.TOOL_LEFT_OUT, tool.where, tool.type))
        elif tool in allowed:
            notices += tool.notices
    tools = [tool for tool in allowed if tool.definition is not None]
    return OfferedTools(
        tools=tuple(tool.definition for tool in tools if tool.definition is not None),
        own=tuple(tool.name for tool in allowed if tool.type == OWN),
        choice=choice,
        freeform={
            tool.definition.name: tool.pattern
            for tool in tools
            if tool.definition is not None and tool.pattern is not None
        },
        notices=bounded(notices),
    )


def asked_choice(value: Any) -> AskedChoice:
    """Return ``tool_choice`` in the form of OpenAI's clients, for chat completions and responses.
    Raises ParameterError.
    """
    if value is None:
        return AskedChoice()
    if isinstance(value, str) and value in _WORDS:
        return AskedChoice(_WORDS[value])
    if not isinstance(value, dict):
        raise ParameterError(_CHOICE, _FORMS)
    if value.get("type") == _NAMESPACE:
        raise ParameterError(_CHOICE, "tool_choice cannot be a namespace; name one of its tools.")
    if value.get("type") != "allowed_tools":
        return AskedChoice(ToolMode.NAMED, named=_reference(value, _CHOICE))
    body = value.get("allowed_tools", value)
    # Chat completions nest another object; responses do not.
    where = _CHOICE if body is value else f"{_CHOICE}.allowed_tools"
    if not isinstance(body, dict) or body.keys() - {"type"} != {"mode", "tools"}:
        raise ParameterError(_CHOICE, _FORMS)
    if body["mode"] not in ("auto", "required"):
        raise ParameterError(f"{where}.mode", f"{where}.mode must be auto or required.")
    tools = body["tools"]
    if not isinstance(tools, list) or not 1 <= len(tools) <= _MAX_REFERENCES:
        raise ParameterError(
            f"{where}.tools", f"{where}.tools must name 1 to {_MAX_REFERENCES} tools."
        )
    named = [_reference(tool, f"{where}.tools[{i}]") for i, tool in enumerate(tools)]
    return AskedChoice(_WORDS[body["mode"]], allowed=tuple(named), where=where)


def _reference(value: Any, where: str) -> ToolReference:
    """Return the reference to a tool. Its name is in the object itself or, in chat completions, in
    an inner object under the type.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ParameterError(where, _FORMS if where == _CHOICE else f"{where} must name a tool.")
    tool_type = value["type"]
    inner = value.get(tool_type)
    if isinstance(inner, dict) and value.keys() == {"type", tool_type}:
        value = inner | {"type": tool_type}
    texts = {key: value.get(key) or "" for key in _REFERENCE_KEYS}
    is_named = bool(texts["name"]) or tool_type not in ("function", "custom", OWN)
    if not is_named or value.keys() - _REFERENCE_KEYS or not _are_texts(texts.values()):
        raise ParameterError(where, _FORMS if where == _CHOICE else f"{where} must name a tool.")
    return ToolReference(tool_type, texts["name"] or texts["server_label"], texts["namespace"])


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _check(given: Sequence[GivenTool]) -> None:
    names = [tool.definition.name for tool in given if tool.definition is not None]
    if len(names) > MAX_TOOLS:
        raise ParameterError("tools", f"tools must have at most {MAX_TOOLS} tools.")
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ParameterError("tools", f"tools has two tools with the name {double}.")


def _fits(tool: GivenTool, reference: ToolReference) -> bool:
    if reference.type == _NAMESPACE:
        return bool(reference.name) and tool.namespace == reference.name
    if reference.type not in ("", tool.type) and (reference.type, tool.type) != ("function", OWN):
        return False
    if reference.namespace not in ("", tool.namespace):
        return False
    names = {tool.name} if tool.definition is None else {tool.name, tool.definition.name}
    return reference.name in names or "" in (reference.name, tool.name)


def _allowed(given: Sequence[GivenTool], asked: AskedChoice) -> list[GivenTool]:
    references = asked.allowed or ()
    for i, reference in enumerate(references):
        if not any(_fits(tool, reference) for tool in given):
            where = f"{asked.where}.tools[{i}]"
            raise ParameterError(where, f"{where}: there is no tool {str(reference)!r:.100}.")
    return [tool for tool in given if any(_fits(tool, one) for one in references)]


def _named(given: Sequence[GivenTool], reference: ToolReference) -> str:
    """Return the name by which the model knows the tool."""
    found = [tool for tool in given if _fits(tool, reference)]
    if not given:
        raise ParameterError(_CHOICE, "tool_choice demands a tool, but there are no tools.")
    if not found:
        raise ParameterError(_CHOICE, f"There is no tool {str(reference)!r:.100}.")
    if len(found) > 1:
        name = f"{str(reference)!r:.100}"
        raise ParameterError(_CHOICE, f"Several tools are called {name}; name the namespace, too.")
    tool = found[0]
    if tool.definition is not None:
        return tool.definition.name
    if tool.type != OWN:
        raise _demanded(tool)
    return tool.name


def _check_there_is_one(allowed: Sequence[GivenTool]) -> None:
    if any(tool.definition is not None or tool.type == OWN for tool in allowed):
        return
    if allowed:
        raise _demanded(allowed[0])
    raise ParameterError(_CHOICE, "tool_choice demands a tool, but there are no tools.")


def _demanded(tool: GivenTool) -> ParameterError:
    return ParameterError(
        tool.where,
        f"{tool.where}: {tool.type:.100} {why_left_out(tool.type)}, so tool_choice cannot demand "
        "it. Give a tool that the client runs, or tool_choice auto.",
    )
