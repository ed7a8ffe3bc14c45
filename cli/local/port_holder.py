"""Who listens on a port of this machine, as far as this user may know."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTENS = "0A"
_MOST_SHOWN = 80


def holder_of(port: int) -> str | None:
    """The process that listens on a TCP port: its pid and command line. None if nobody does, or if
    it is another user's."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _has_open(process, wanted):
            return f"pid {process.name}, {_command_line(process)}"
    return None


def _has_open(process: Path, wanted: set[str]) -> bool:
    # Processes end and files close while we look, and those of others show nothing.
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()) in wanted:
                    return True
    return False


def _listening(table: str, port: int) -> list[str]:
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [
        row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
    ]


def _command_line(process: Path) -> str:
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().split(b"\0")
    shown = " ".join(word.decode(errors="replace") for word in words).strip()
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 1]}…"
