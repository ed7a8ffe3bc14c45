"""Which ``millrace up`` has a data folder: told by its pid and by when that process began, so that
another process which was given the same pid since is never taken for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

PID_FILE = "up.pid"
SOCKET_FILE = "control.sock"
# Field 22 of /proc/PID/stat, counted from the state, which follows the name in parentheses.
_START_FIELD = 19


@dataclass(frozen=True)
class Supervising:
    """A running ``millrace up``; ``started_ticks`` is when it began, in the kernel's ticks since
    the machine was started."""

    pid: int
    started_ticks: int

    @property
    def up_s(self) -> float:
        """Seconds since it began."""
        machine_up_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, machine_up_s - self.started_ticks / os.sysconf("SC_CLK_TCK"))

    def terminate(self, within_s: float) -> bool:
        """SIGTERM, to this process and to no other of its pid; whether it has ended in time."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # The handle is of whatever has the pid now, and stays its.
            if started_ticks(self.pid) != self.started_ticks:
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(within_s * 1e3))
        finally:
            os.close(handle)


def started_ticks(pid: int) -> int | None:
    """When the process began; None if it has ended, also if nobody has asked how so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])


def own_line() -> str:
    """What this process writes into its pid file."""
    pid = os.getpid()
    return f"{pid} {started_ticks(pid)}\n"


def supervising(data: Path) -> Supervising | None:
    """Who runs on ``data``; None if nobody does, or who did was killed."""
    try:
        words = (data / "run" / PID_FILE).read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    found = Supervising(*map(int, words))
    return found if started_ticks(found.pid) == found.started_ticks else None


def lasting(seconds: float) -> str:
    """A length of time in two units at most: 5 s, 3 min 20 s, 2 h 5 min, 4 d 1 h."""
    left = int(seconds)
    days, hours, minutes = left // 86_400, left // 3_600 % 24, left // 60 % 60
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (left % 60, "s"))
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"
