"""Secrets of the configuration: what they are, and how they stay out of what is shown."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

HIDDEN = "***"

Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
"""Text that is never shown: ``repr`` of the section that holds it says only whether it is set."""


def is_secret(kind: Any) -> bool:
    """Whether a setting's type is ``Secret``."""
    return any(
        isinstance(note, msgspec.Meta) and bool((note.extra or {}).get("secret"))
        for note in getattr(kind, "__metadata__", ())
    )


def redact_urls(text: str) -> str:
    """Addresses, comma separated, without what stands before the ``@`` of any of them."""
    return ",".join(_redact(one) for one in split_urls(text))


def split_urls(text: str) -> list[str]:
    """The addresses of a comma separated list. A comma may also be in a password that should have
    been encoded: pieces without an ``@`` belong to the next piece that has one and no scheme."""
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
    # A password may hold a "/" or a second "@": all up to the last "@" is taken for user data.
    user, at, place = rest.rpartition("@")
    if not at:
        return url
    return f"{head}{scheme_end}{HIDDEN if user else ''}@{place}"


def shown(section: msgspec.Struct) -> str:
    """A section as ``repr`` shows it: secrets hidden, addresses without user data."""
    parts = []
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if is_secret(field.type):
            value = HIDDEN if value else ""
        elif isinstance(value, str) and "@" in value:
            value = redact_urls(value)
        parts.append(f"{field.name}={value!r}")
    return f"{type(section).__name__}({', '.join(parts)})"
