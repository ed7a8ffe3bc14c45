"""Anthropic's tools that the client runs and whose input Anthropic's models were trained on.

Requests give no schema of these tools. Models here are told the schema that Anthropic
documents, and call these tools like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.registry.requests.offered.provider_tools import unversioned

_STRING: Mapping[str, Any] = {"type": "string"}


def _object(required: tuple[str, ...], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "The first and the last line to show; -1 is the last of the file.",
}
_CHANGES: Mapping[str, Any] = {
    "path": _STRING,
    "file_text": {**_STRING, "description": "The whole text of the file to create."},
    "old_str": {**_STRING, "description": "The text to replace, which the file has once."},
    "new_str": {**_STRING, "description": "The text to put in its place."},
    "insert_line": {"type": "integer", "description": "Insert behind this line; 0: at the top."},
    "insert_text": {**_STRING, "description": "The text to insert."},
    "view_range": _LINES,
}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "bash": _object(
        (),
        {
            "command": {**_STRING, "description": "The command to run in the shell."},
            "restart": {"type": "boolean", "description": "Start the shell anew instead."},
        },
    ),
    "text_editor": _object(
        ("command", "path"),
        {"command": _one_of("view", "create", "str_replace", "insert"), **_CHANGES},
    ),
    "memory": _object(
        ("command",),
        {
            "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_CHANGES,
            "old_path": _STRING,
            "new_path": _STRING,
        },
    ),
}
_DESCRIPTIONS = {
    "bash": "Run a command in a shell that stays open between calls.",
    "text_editor": "View, create and edit files.",
    "memory": "Keep notes in files under /memories, which later conversations can read.",
}
CLIENT_TOOL_TYPES = tuple(_SCHEMAS)


def client_tool(tool_type: str) -> tuple[str, dict[str, Any]] | None:
    """The description and the schema of the input of a tool of that type, whatever its version;
    None: there is no such tool."""
    kind = unversioned(tool_type)
    return (_DESCRIPTIONS[kind], _SCHEMAS[kind]) if kind in _SCHEMAS else None
