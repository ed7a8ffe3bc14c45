"""How a process ended, in words and for records."""

from __future__ import annotations

import signal
from pathlib import Path

# Where Linux counts the processes that it killed for want of memory: of this control group, and of
# the machine.
_COUNTERS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


def how_it_ended(code: int) -> str:
    """Return a return code in words: ``exit code 1``, ``signal SIGKILL``."""
    return f"signal {signal_name(code)}" if code < 0 else f"exit code {code}"


def signal_name(code: int) -> str:
    """Return the name of the signal of a negative return code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)  # a real-time signal


def num_oom_kills() -> int:
    """How many processes were killed because memory was short, since some moment. A process that
    SIGKILL ended while this rose was one of them, as far as can be told."""
    total = 0
    for path, name in _COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
    return total


def was_out_of_memory(code: int, oom_kills_before: int) -> bool:
    """Whether a process that ended so was killed because memory was short; ``oom_kills_before`` is
    what ``num_oom_kills`` said when the process began."""
    return code == -signal.SIGKILL and num_oom_kills() > oom_kills_before
