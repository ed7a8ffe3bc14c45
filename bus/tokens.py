"""Free strings as tokens of subjects, one to one."""

from __future__ import annotations

import re

# The last token of an envelope's subject. ``token`` never yields it.
ENVELOPE = "_"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_NOT_PLAIN = re.compile(rb"[^A-Za-z0-9_-]")
_ENCODED = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+")
_EMPTY = "%"


def token(text: str) -> str:
    """``text`` as one subject token: percent-encoded UTF-8, one to one.

    Letters, digits, ``-`` and ``_`` stay; the empty string is ``%``; ``_`` alone is encoded, as it
    is the envelope's own token.
    """
    if _PLAIN.fullmatch(text) and text != ENVELOPE:
        return text
    if not text:
        return _EMPTY
    if text == ENVELOPE:
        return "%5F"
    encoded = _NOT_PLAIN.sub(
        lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "surrogatepass")
    )
    return encoded.decode("ascii")


def untoken(encoded: str) -> str:
    """The text that ``token`` encoded. Raises ValueError for what ``token`` cannot have made."""
    if encoded == _EMPTY:
        return ""
    if not _ENCODED.fullmatch(encoded):
        raise ValueError("not an encoded subject token")
    if "%" not in encoded and encoded != ENVELOPE:
        return encoded
    raw = re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), encoded)
    try:
        text = raw.encode("latin-1").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError("not an encoded subject token") from error
    if token(text) != encoded:
        raise ValueError("not an encoded subject token")
    return text
