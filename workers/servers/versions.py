"""Versions of servers, as they write them."""

from __future__ import annotations

import re


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version."""
    found = re.match(r"[^\d]*(\d+(?:\.\d+)*)", text)
    return tuple(map(int, found.group(1).split("."))) if found else ()
