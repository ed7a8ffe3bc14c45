"""Tools that a model may call, and its calls."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec

from millrace.schemas.errors import ParameterError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolFormat(StrEnum):
    """Format of a model's tool calls; docs/tools.md shows each. HERMES (also Qwen): ``<tool_call>``
    around a JSON object with ``name`` and ``arguments``. LLAMA3: the answer is a JSON object with
    ``name`` and ``parameters``, or several with ``;`` between them, optionally after
    ``<|python_tag|>``. PYTHONIC: the answer is ``[name(key=value, …), …]``. MISTRAL:
    ``[TOOL_CALLS]`` and a list of objects as in HERMES. MISTRAL_V11: ``[TOOL_CALLS]name[ARGS]{…}``
    for each call. QWEN3_CODER and GLM45: ``<tool_call>`` around a name and arguments with their own
    tags. DEEPSEEK_V3 (also R1) and DEEPSEEK_V31: a name and a JSON object between
    ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``. V3 puts the object in a code fence."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    MISTRAL_V11 = "mistral_v11"
    QWEN3_CODER = "qwen3_coder"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM45 = "glm45"


def check_tool_name(name: str, field: str, subject: str = "") -> None:
    """Raise ParameterError for an invalid tool name.

    Args:
        name: The tool's name.
        field: The request's field that holds it.
        subject: The subject of the error's sentence; empty: the field.
    """
    if not _NAME.fullmatch(name):
        raise ParameterError(
            field,
            f"{subject or field} must be 1 to 64 letters, digits, _ or -, got {name!r:.100}",
        )


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Function that the model may call; ``parameters`` is the JSON Schema of its arguments, an
    object (None: no arguments).

    Raises ParameterError for a name that is not 1 to 64 letters, digits, ``_`` or ``-``.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        check_tool_name(self.name, "tools", "a tool's name")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Call in an assistant's turn; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolMode(StrEnum):
    """Mode of tool use: the model may, must not or must call a tool; NAMED: a given tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of tools. ``name`` is set with NAMED only."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
