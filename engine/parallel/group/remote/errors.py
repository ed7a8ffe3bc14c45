"""What goes wrong between the hosts of a group."""

from __future__ import annotations

from millrace.schemas.errors import MillraceError


class StageError(MillraceError, code="stage_failed", retryable=True):
    """The connection to a stage of another host has ended, or what came by it makes no sense."""


class StageRefusedError(StageError, code="stage_refused", retryable=False):
    """One side will not have the other, and says how to mend it: trying again changes nothing."""
