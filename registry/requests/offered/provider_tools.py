"""Tools that a provider's server runs for its own models, by their types.

Clients send such tools with every request, whatever server they talk to. No model here can be
offered one: the client does not run it, and neither does this gateway.
"""

from __future__ import annotations

import re

# A type may have its version behind it: web_search_20250305, web_search_preview_2025_03_11.
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
    """The type of a tool without its version."""
    return _VERSION.sub("", tool_type)


def is_left_out(tool_type: str) -> bool:
    """Whether tools of that type are left out of every request."""
    return unversioned(tool_type) in _PROVIDER_TYPES | _SCREEN_TYPES


def why_left_out(tool_type: str) -> str:
    """The end of a sentence that says why such a tool cannot be demanded."""
    if unversioned(tool_type) in _SCREEN_TYPES:
        return "answers with pictures, which no model here takes"
    return "is run by its provider's own server only"
