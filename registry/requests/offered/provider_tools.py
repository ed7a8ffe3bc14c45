"""Tools that a provider's server runs for its own models, and Anthropic's tools that the client
runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A type may end with its version: web_search_20250305, web_search_preview_2025_03_11.
_VERSION = re.compile(r"_(?:\d{8}|\d{4}_\d{2}_\d{2})$")
_PROVIDER_TYPES = frozenset(
    {
        *("web_search", "web_search_preview", "web_fetch", "file_search", "code_interpreter"),
        *("code_execution", "image_generation", "mcp", "mcp_toolset", "programmatic_tool_calling"),
        *("tool_search", "tool_search_tool_regex", "tool_search_tool_bm25", "advisor"),
    }
)
# The client runs these tools, but they answer with pictures, which no model here takes.
_SCREEN_TYPES = frozenset({"computer", "computer_use", "computer_use_preview"})


def unversioned(tool_type: str) -> str:
    """Return the type of a tool without its version."""
    return _VERSION.sub("", tool_type)


def is_left_out(tool_type: str) -> bool:
    """Return whether tools of that type are left out of every request."""
    return unversioned(tool_type) in _PROVIDER_TYPES | _SCREEN_TYPES


def why_left_out(tool_type: str) -> str:
    """Return the end of a sentence that says why such a tool cannot be demanded."""
    if unversioned(tool_type) in _SCREEN_TYPES:
        return "answers with pictures, which no model here takes"
    return "is run by its provider's own server only"


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
    """Return the description and the input schema of a tool of that type, in any version; None if
    there is no such tool.
    """
    kind = unversioned(tool_type)
    return (_DESCRIPTIONS[kind], _SCHEMAS[kind]) if kind in _SCHEMAS else None
