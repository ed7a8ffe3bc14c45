"""Where programs keep what they made once for a machine and may make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``millrace`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``; it need not be there yet. Raises
    RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millrace"
