"""Thoughts as ``encrypted_content``, for clients that send back only this field of reasoning.

Answers have the thoughts as plain text, too, so the content is encoded, not encrypted.
"""

from __future__ import annotations

import base64
import binascii

# What a request includes to get them.
THOUGHTS = "reasoning.encrypted_content"
_MARK = "millrace1."


def sealed(text: str) -> str:
    """Encode thoughts in the form that ``opened`` reads."""
    return _MARK + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def opened(content: str) -> str | None:
    """Return the thoughts that ``sealed`` wrote; None for content of another server."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
