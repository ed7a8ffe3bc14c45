"""Tools of a chat completion, in OpenAI's format."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool that the client runs. ``parameters`` is the JSON Schema of its arguments."""

    function: FunctionFields
    type: Literal["function"] = "function"


class FunctionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTextFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""


class CustomGrammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Grammar of a text, in Lark's notation or as a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomGrammarFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="grammar",
):
    """Text that matches ``grammar``."""

    grammar: CustomGrammar


class CustomFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a tool whose input is text."""

    name: str
    description: str | None = None
    format: CustomTextFormat | CustomGrammarFormat | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool that the client runs and whose input is one text."""

    custom: CustomFields
    type: Literal["custom"]


ChatTool = FunctionTool | CustomTool
