"""What goes wrong between peers."""

from __future__ import annotations

from millrace.schemas.errors import MillraceError


class PeerError(MillraceError, code="kv_peer_failed", retryable=True):
    """A peer did not say what it should, or not in time; what was asked of it is computed."""
