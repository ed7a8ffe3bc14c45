"""Logs of a local system: messages of ``millrace up``, and the size limit of log files."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from millrace.runtime.logs import JsonFormatter

UP_LOG = "up.log"
# Maximum size of a log file in bytes. Each part has a current file and an older one with the suffix
# OLDER.
MOST_BYTES = 64 << 20
OLDER = ".1"
CHECK_EVERY_S = 10.0


def bound_logs(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Move the contents of each file over the limit to a second file, whose contents are replaced.

    The first file itself stays, since a process has it open for appending; lines written in between
    are lost.
    """
    for file in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if file.stat().st_size > most_bytes:
                shutil.copyfile(file, file.with_name(file.name + OLDER))
                os.truncate(file, 0)


class UpLog:
    """Messages of ``millrace up``, on the terminal and in a log beside those of the parts."""

    def __init__(self, folder: Path) -> None:
        self._handler = logging.FileHandler(folder / UP_LOG, encoding="utf-8", delay=True)
        self._handler.setFormatter(JsonFormatter("up"))

    def say(self, text: str) -> None:
        """Write an event to the terminal, and to the log if it is a single line."""
        self._tell(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Write a problem to the terminal, and to the log if it is a single line."""
        self._tell(text, logging.WARNING)

    def _tell(self, text: str, level: int) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(text, flush=True)
        if text.strip() and "\n" not in text:
            self.note(text, level)

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Write a message to the log only."""
        record = logging.LogRecord("millrace.cli.local.up", level, __file__, 0, text, None, None)
        self._handler.handle(record)

    def close(self) -> None:
        self._handler.close()
