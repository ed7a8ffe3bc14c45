"""Check whether a process has an embedded store open, by the lock on a file in its folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_LOCKED_FILE = "status"


def is_taken(folder: Path) -> bool:
    """Return at once whether another process has the store in ``folder`` open. The lock ends with
    its process in any case."""
    try:
        file = (folder / _LOCKED_FILE).open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return b"PID: %d\n" % os.getpid() not in file.read()
    return False
