"""Thoughts as ``encrypted_content``, for clients that send nothing else of a reasoning item back.

Thoughts are told here as they are, so nothing needs to be hidden in it.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "millrace1."


def sealed(text: str) -> str:
    """The text in the form that ``opened`` reads."""
    return _MARK + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def opened(content: str) -> str | None:
    """The thoughts of an answer of ours; None: of another server, which alone can read them."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
