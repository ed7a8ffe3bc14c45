"""The servers of other engines that run under a worker."""

from __future__ import annotations

import psutil

from tests.support.system import System


def server_process(system: System, program: str, worker: str = "worker-1") -> psutil.Process:
    """The outermost process of the server that the worker runs: not the guardian that watches it.
    Raises LookupError if there is none."""
    for child in psutil.Process(system.pid(worker)).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        is_guardian = any(part.endswith("guardian.py") for part in command)
        if not is_guardian and any(program in part for part in command):
            return child
    raise LookupError(f"no process of {program} runs under {worker}")


def runs(process: psutil.Process) -> bool:
    """Return whether the process has not ended; a zombie has."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
