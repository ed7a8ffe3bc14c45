"""JSON Schema documents of the structs of ``schemas/``, for API contracts."""

from __future__ import annotations

import re
from typing import Any

import msgspec

Schema = dict[str, Any]

# Path of a named schema in OpenAPI and AsyncAPI documents.
REF = "#/components/schemas/{name}"


def pascal(name: str) -> str:
    """Convert a name to the case of titles: ``tool_choice`` becomes ``ToolChoice``."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", name))


def without_discriminators(node: Any) -> Any:
    """Return a schema without OpenAPI's ``discriminator``. Other readers ignore it, and each
    struct's tag carries the same information."""
    if isinstance(node, dict):
        return {
            key: without_discriminators(value)
            for key, value in node.items()
            if key != "discriminator"
        }
    if isinstance(node, list):
        return list(map(without_discriminators, node))
    return node


def document_text(document: Schema) -> str:
    """Return the document as it is checked in: sorted keys, two spaces per level."""
    raw = msgspec.json.encode(document, order="deterministic")
    return msgspec.json.format(raw, indent=2).decode() + "\n"
