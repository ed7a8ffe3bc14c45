"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """Return a return code in words: ``exit code 1``, ``signal SIGKILL``."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
