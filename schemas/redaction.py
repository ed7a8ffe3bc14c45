"""Redaction of secrets in the configuration."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

HIDDEN = "***"

Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
"""Text that is never shown: ``repr`` of the section that holds it says only whether it is set."""


def is_secret(kind: Any) -> bool:
    """Return whether a setting's type is ``Secret``."""
    return any(
        isinstance(note, msgspec.Meta) and bool((note.extra or {}).get("secret"))
        for note in getattr(kind, "__metadata__", ())
    )


def redact_urls(text: str) -> str:
    """Return comma separated addresses without their user data (the text before the ``@``)."""
    return ",".join(_redact(one) for one in split_urls(text))


def split_urls(text: str) -> list[str]:
    """Split a comma separated list of addresses. A comma may also stand in a password that should
    have been encoded: a piece without an ``@`` belongs to the next piece with an ``@`` and no
    scheme."""
    found: list[str] = []
    for piece in text.split(","):
        if "@" in piece and "://" not in piece:
            while found and "@" not in found[-1]:
                piece = f"{found.pop()},{piece}"
        found.append(piece)
    return found


def _redact(url: str) -> str:
    head, scheme_end, rest = url.partition("://")
    if not scheme_end:
        head, rest = "", url
    # A password may hold a "/" or a second "@": everything before the last "@" is user data.
    user, at, place = rest.rpartition("@")
    if not at:
        return url
    return f"{head}{scheme_end}{HIDDEN if user else ''}@{place}"


def shown(section: msgspec.Struct) -> str:
    """Return the ``repr`` of a section with hidden secrets and without user data in addresses."""
    parts = []
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if is_secret(field.type):
            value = HIDDEN if value else ""
        elif isinstance(value, str) and "@" in value:
            value = redact_urls(value)
        parts.append(f"{field.name}={value!r}")
    return f"{type(section).__name__}({', '.join(parts)})"
