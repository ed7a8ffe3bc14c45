"""What processes have used of the machine, by reading it twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil


class Reading(msgspec.Struct, frozen=True):
    """What a process has used since it started."""

    role: str
    cpu_s: float
    num_switches: int


def role_of(command: Sequence[str]) -> str:
    """What a process is by its command line: the module that ``python -m`` runs, or the program."""
    words = list(command)
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    # Redis writes its address behind its name.
    return Path(words[0]).name.split()[0] if words else "ended"


def read(processes: Sequence[psutil.Process]) -> dict[int, Reading]:
    """By process id, of those that still run."""
    readings = {}
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                readings[process.pid] = Reading(
                    role_of(process.cmdline()),
                    float(times.user + times.system),
                    _voluntary_switches(process.pid),
                )
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return readings


def _voluntary_switches(pid: int) -> int:
    """Of all its threads: the process's own file has those of its first thread alone."""
    num_switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                num_switches += int(line.split()[1])
    return num_switches
