"""Documents of contracts, made from the structs of ``schemas/``."""

from __future__ import annotations

from typing import Any

import msgspec

Schema = dict[str, Any]


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
