"""Identity of the ``millrace up`` that has a data folder: its pid and start time, so that another
process with a reused pid is never mistaken for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

PID_FILE = "up.pid"
SOCKET_FILE = "control.sock"
# Index of the start time in /proc/PID/stat, counted from the state, which follows the name in
# parentheses.
_START_FIELD = 19


@dataclass(frozen=True)
class Supervising:
    """Running ``millrace up``; ``started_ticks`` is its start, in the kernel's ticks since the
    machine's boot."""

    pid: int
    started_ticks: int

    @property
    def up_s(self) -> float:
        """Seconds since its start."""
        machine_up_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, machine_up_s - self.started_ticks / os.sysconf("SC_CLK_TCK"))

    def terminate(self, within_s: float) -> bool:
        """Send SIGTERM to this process, never to another with a reused pid; return whether it ended
        in time."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # The handle refers to the current owner of the pid, for good.
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
    """Return the start time of a process; None if it has ended, even if its parent has not waited
    for it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])


def own_line() -> str:
    """Return the line that this process writes into its pid file."""
    pid = os.getpid()
    return f"{pid} {started_ticks(pid)}\n"


def supervising(data: Path) -> Supervising | None:
    """Return the ``millrace up`` that runs on ``data``; None if there is none or it was killed."""
    try:
        words = (data / "run" / PID_FILE).read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    found = Supervising(*map(int, words))
    return found if started_ticks(found.pid) == found.started_ticks else None


def lasting(seconds: float) -> str:
    """Format a duration in at most two units: 5 s, 3 min 20 s, 2 h 5 min, 4 d 1 h."""
    left = int(seconds)
    days, hours, minutes = left // 86_400, left // 3_600 % 24, left // 60 % 60
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (left % 60, "s"))
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"
