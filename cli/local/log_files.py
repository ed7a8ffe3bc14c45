"""The logs of a local system: what ``millrace up`` itself says, and how large they may grow."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from millrace.runtime.logs import JsonFormatter

UP_LOG = "up.log"
# Of each part there are two files of this size at most, the older one with OLDER behind its name.
MOST_BYTES = 64 << 20
OLDER = ".1"
CHECK_EVERY_S = 10.0


def bound_logs(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Move what is in each file that is larger to a second one, over what that held.

    The file itself stays, since a process has it open, to write at its end; what it writes in the
    moment between is lost."""
    for file in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if file.stat().st_size > most_bytes:
                shutil.copyfile(file, file.with_name(file.name + OLDER))
                os.truncate(file, 0)


class UpLog:
    """Says what ``millrace up`` does, on the terminal and in a log beside those of the parts."""

    def __init__(self, folder: Path) -> None:
        self._handler = logging.FileHandler(folder / UP_LOG, encoding="utf-8", delay=True)
        self._handler.setFormatter(JsonFormatter("up"))

    def say(self, text: str) -> None:
        """One thing, on a line of the log if it is one."""
        self._tell(text, logging.INFO)

    def warn(self, text: str) -> None:
        """The same of what should not have happened."""
        self._tell(text, logging.WARNING)

    def _tell(self, text: str, level: int) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(text, flush=True)
        if text.strip() and "\n" not in text:
            self.note(text, level)

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Only in the log."""
        record = logging.LogRecord("millrace.cli.local.up", level, __file__, 0, text, None, None)
        self._handler.handle(record)

    def close(self) -> None:
        self._handler.close()
