"""Ids of files and batches, which sort by time."""

from __future__ import annotations

import secrets

_NS_PER_MS = 1_000_000


def new_ordered_id(prefix: str, now_ns: int) -> str:
    """An id that sorts by time: ``prefix``, milliseconds and 48 random bits."""
    return f"{prefix}{now_ns // _NS_PER_MS:012x}{secrets.token_hex(6)}"


def created_ms(ordered_id: str) -> int:
    """When an id was drawn. Raises ValueError for one that was not."""
    return int(ordered_id[-24:-12], 16)
