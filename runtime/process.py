"""Processes: start, memory, signals, and exit codes.

A process that fails ends with one sentence and an exit code that tells the cause.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import site
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from millrace.schemas.errors import ConfigError, MillraceError, ModelNotFoundError

_PR_SET_PDEATHSIG = 1
_CGROUP = Path("/sys/fs/cgroup")

DONE = 0
FAILED = 1
MISCONFIGURED = 2

logger = logging.getLogger(__name__)

# Folder of the package: a checkout, or the folder of installed distributions.
_ROOT = Path(__file__).absolute().parents[2]
# Linux's counters of processes killed for lack of memory: of this control group, and of the
# machine.
_COUNTERS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a Millrace module with this interpreter.

    ``-P`` prevents imports from the user's current folder.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of such a command.

    It imports the same packages as this process, also those of a checkout that is not installed.
    """
    search = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    if str(_ROOT) not in installed.union(search):
        search.insert(0, str(_ROOT))
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}


def release_free_memory() -> None:
    """Return freed memory to the system.

    The allocator keeps it in each thread's arena and between used pieces. Only glibc has this call
    and needs it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Return the bytes available without swapping, within the container's limit if it has one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    free = int(sizes["MemAvailable"].split()[0]) * 1024
    try:
        bound = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if bound == "max" else min(free, max(0, int(bound) - used))


def exit_code_of(part: str, run: Callable[[], None]) -> int:
    """Run a part to its end and return its exit code.

    ``MISCONFIGURED``, with a sentence on stderr: the configuration is wrong or names an unknown
    model. ``FAILED``: any other error, with a sentence, or for a bug with its traceback in the log.
    """
    try:
        run()
    except MillraceError as error:
        sys.stderr.write(f"{part}: {error.message}\n")
        is_setting = isinstance(error, ConfigError | ModelNotFoundError)
        return MISCONFIGURED if is_setting else FAILED
    except Exception:
        logger.exception("the process failed")
        return FAILED
    return DONE


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. Call it in the event loop."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


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
    """Return the number of processes killed for lack of memory since some fixed time.

    A process that ended by SIGKILL while this number rose was probably one of them.
    """
    total = 0
    for path, name in _COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
    return total


def was_out_of_memory(code: int, oom_kills_before: int) -> bool:
    """Return whether a process that ended with this code was killed for lack of memory.

    ``oom_kills_before`` is the ``num_oom_kills()`` from when the process began.
    """
    return code == -signal.SIGKILL and num_oom_kills() > oom_kills_before
