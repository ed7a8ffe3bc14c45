"""Tools in the format of OpenAI's Responses API.

Fields about who may call a tool, or about a search before the model sees it, are hints without
effect.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.openai import not_given


class _Tool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    allowed_callers: tuple[str, ...] | None = None
    defer_loading: bool | None = None


class FlatFunctionTool(
    _Tool, frozen=True, kw_only=True, tag="function", forbid_unknown_fields=True
):
    """Function that the client runs; ``parameters`` is the JSON Schema of its arguments.

    ``output_schema`` is accepted and has no effect.
    """

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=not_given)
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class FlatTextFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""


class FlatGrammarFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="grammar",
):
    """Text that matches ``definition``, in Lark's notation or as a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class FlatCustomTool(_Tool, frozen=True, kw_only=True, tag="custom", forbid_unknown_fields=True):
    """Tool that the client runs and whose input is one text."""

    name: str
    description: str | None = None
    format: FlatTextFormat | FlatGrammarFormat | None = None


class NamespaceTool(_Tool, frozen=True, kw_only=True, tag="namespace", forbid_unknown_fields=True):
    """Functions and custom tools under one name; a call also names the namespace."""

    name: str
    tools: tuple[msgspec.Raw, ...]
    description: str | None = None


class LocalShellTool(_Tool, frozen=True, kw_only=True, tag="local_shell"):
    """Commands that the client runs."""


class ShellTool(_Tool, frozen=True, kw_only=True, tag="shell", forbid_unknown_fields=True):
    """Commands that the client runs, or the provider if the ``environment`` has another type than
    ``local``."""

    environment: dict[str, Any] | None = None


class ApplyPatchTool(_Tool, frozen=True, kw_only=True, tag="apply_patch"):
    """Changes of files that the client makes."""


class ToolSearchTool(
    _Tool, frozen=True, kw_only=True, tag="tool_search", forbid_unknown_fields=True
):
    """Search for tools. The client runs it if ``execution`` says so, else the provider."""

    execution: Literal["server", "client"] = "server"
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=not_given)


class NamedServerTool(_Tool, frozen=True, kw_only=True, tag="server", forbid_unknown_fields=True):
    """Tool that the gateway runs itself."""

    name: str


ResponseTool = (
    FlatFunctionTool
    | FlatCustomTool
    | NamespaceTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
    | ToolSearchTool
    | NamedServerTool
)
