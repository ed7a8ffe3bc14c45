"""Errors of the journal."""

from __future__ import annotations

from schemas.errors import MillraceError


class JournalConflictError(MillraceError, code="conflict", retryable=True, http_status=409):
    """Somebody else wrote under that name in the meantime; nothing was stored."""

    def __init__(self) -> None:
        super().__init__("Somebody else changed it at the same time. Try again.")
