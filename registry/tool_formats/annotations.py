"""Removes from schemas the annotations that no grammar needs."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.sampling import SCHEMA_SETTINGS
from millrace.schemas.tools import ToolDefinition

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "examples", "default", "$comment", "deprecated"),
        *("readOnly", "writeOnly"),
    }
)
_BY_NAME = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    }
)
_VALUES = frozenset({"const", "enum", SCHEMA_SETTINGS})


def without_annotations(tool: ToolDefinition) -> ToolDefinition:
    """The tool without the annotations of its parameters. Descriptions make up most of many
    schemas, and the length of a grammar is limited."""
    parameters = None if tool.parameters is None else _bare(tool.parameters)
    return msgspec.structs.replace(tool, parameters=parameters)


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _bare(one) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else _bare(value)
    return found
