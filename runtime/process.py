"""How a process of ours is started, gives memory back and learns how much there is, and ends: with
one sentence, and an exit code that says whose fault it is."""

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

# What holds the package: a checkout, or where distributions are installed.
_ROOT = Path(__file__).absolute().parents[2]
# Where Linux counts the processes that it killed for want of memory: of this control group, and of
# the machine.
_COUNTERS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours with this interpreter.

    ``-P``: nothing of the folder in which the user happens to be is imported.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of such a command: it imports the very packages that this process does, also
    those of a checkout that is not the one installed."""
    search = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    if str(_ROOT) not in installed.union(search):
        search.insert(0, str(_ROOT))
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}


def release_free_memory() -> None:
    """Return to the system what was freed: the allocator keeps it, in each thread's arena and in
    pieces between what is in use. Other systems than glibc's have no such call, and need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """What can be had without swapping, in this container if it has a bound of its own."""
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

    ``MISCONFIGURED``, with a sentence on stderr, if its configuration is at fault or names a model
    that there is not; ``FAILED`` if anything else ends it, with a sentence, or, for a bug, with
    its traceback in the log.
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
    """Set by SIGTERM and SIGINT from now on. Call it in the event loop."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread of its parent that started it ends, however
    that does."""
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
