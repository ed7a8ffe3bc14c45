"""Leaving a store alone that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

# After a failure, and twice as long after each that follows it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Circuit:
    """Whether a store is to be asked: not for a while after it failed. What was under way meanwhile
    fails for the same reason, and makes the pause no longer. Notes are for one thread;
    ``is_open`` is for any."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        """Whether it is left alone now."""
        return self._monotonic() < self._until_s

    def note_failure(self, why: str) -> None:
        if self.is_open:
            return
        _log.warning(
            "the object store of the KV cache is left alone for %g s: %s", self._pause_s, why
        )
        self._until_s = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def note_success(self) -> None:
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
