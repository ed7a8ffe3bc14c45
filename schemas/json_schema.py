"""Documents of contracts, made from the structs of ``schemas/``."""

from __future__ import annotations

import re
from typing import Any

import msgspec

Schema = dict[str, Any]

# Where OpenAPI and AsyncAPI documents keep a schema with a name.
REF = "#/components/schemas/{name}"


def pascal(name: str) -> str:
    """Return a name in the case that titles have: ``tool_choice`` is ``ToolChoice``."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", name))


def without_discriminators(node: Any) -> Any:
    """A schema without OpenAPI's ``discriminator``, which nothing else reads; each struct's own tag
    says as much."""
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
    """The document as it is checked in: its keys sorted, two spaces a level."""
    raw = msgspec.json.encode(document, order="deterministic")
    return msgspec.json.format(raw, indent=2).decode() + "\n"
