"""Choice of the engine's compute threads, before torch starts them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from millrace.schemas.config import EngineConfig

_MAX_DEFAULT_THREADS = 16
_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# Turns of GNU OpenMP's spin loop, some tenths of a millisecond: long enough for the gaps between
# the operations of a step, so that threads stay awake within it (with 2,000 turns a step of 11 ms
# took 25 ms), and short compared to a time slice.
_SPIN_COUNT = "20000"
# Variables by which users bind threads to cores.
_BINDING = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
_cores: set[int] = set()
# OMP_PLACES of each rank of a group; empty if threads are not bound.
_places_of_ranks: list[str] = []


def configure_threads(
    config: EngineConfig, shared: bool, environ: MutableMapping[str, str] | None = None
) -> int:
    """Set the number of compute threads for this process and its children; return it.

    Must be called before torch is imported: OpenMP reads its environment once. ``shared`` means
    that other processes of the system run on the machine; they get one of four cores. A
    ``num_threads`` above 0 is used as it is. Otherwise the user's own OMP_* and GOMP_* variables
    are respected.

    Threads that wait for the next operation sleep on a shared machine; otherwise they spin briefly
    first. OpenMP's default is to spin for milliseconds, which blocks the thread that they wait for
    when another process is busy: with two threads beside one busy process, a step of a 100M model
    took 155 ms instead of 19 ms.

    If there is a thread for each core that this process may use, each is bound to one. Otherwise
    Linux may keep two threads that wait for each other on one core, while another core is idle or
    runs low-priority work, which Linux counts as busy. Beside such work, half of the starts on 2
    cores made steps three times as long. Threads outside the team call ``leave_core``. The ranks of
    a group on this host share the cores, each with its own.
    """
    environ = os.environ if environ is None else environ
    num_stages = config.pipeline_parallel - config.remote_stages
    num_ranks = max(1, config.tensor_parallel * num_stages)
    if not _cores:  # a bound thread would see one core only
        _cores.update(os.sched_getaffinity(0))
    if config.num_threads > 0:
        environ["OMP_NUM_THREADS"] = str(config.num_threads)
    else:
        of_all_ranks = default_num_threads(usable_cores(), shared)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, of_all_ranks // num_ranks)))
    if shared:
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    num_threads = int(environ["OMP_NUM_THREADS"].split(",")[0])
    if num_ranks * num_threads == len(_cores) > 1 and not _BINDING & environ.keys():
        every = places(sorted(_cores), os.getpid()).split(",")
        _places_of_ranks[:] = [
            ",".join(every[begin : begin + num_threads])
            for begin in range(0, len(every), num_threads)
        ]
        environ["OMP_PROC_BIND"] = "true"
        environ["OMP_PLACES"] = _places_of_ranks[0]
    if "torch" in sys.modules:
        # Too late for the wait policy, but not for the size of the pool.
        sys.modules["torch"].set_num_threads(num_threads)
    return num_threads


def environment_of_rank(rank: int) -> dict[str, str]:
    """Return the environment variables for the threads of another rank's process."""
    return {"OMP_PLACES": _places_of_ranks[rank]} if rank < len(_places_of_ranks) else {}


def cores_of_process() -> set[int]:
    """Return the cores that this process may use, regardless of the binding of its threads."""
    return _cores or os.sched_getaffinity(0)


def places(cores: Sequence[int], number: int) -> str:
    """Return the cores in rotated order for OMP_PLACES.

    Each engine ``number`` begins at another core, because the first thread does more work than the
    others.
    """
    first = number % len(cores)
    return ",".join(f"{{{core}}}" for core in (*cores[first:], *cores[:first]))


def leave_core() -> None:
    """Allow the calling thread to run on any core of this process.

    A thread starts on the core of its creator, which is the engine's own.
    """
    if _cores:
        os.sched_setaffinity(0, _cores)


def default_num_threads(num_cores: int, shared: bool) -> int:
    """Return all cores, or three of four on a shared machine: at least 1, at most 16."""
    return max(1, min(num_cores - num_cores // 4 * shared, _MAX_DEFAULT_THREADS))


def usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Return the number of cores that this process may use, by affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    if cpu_max.is_file():
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.floor(int(quota) / int(period))))
    return cores


def choose_threads(config: EngineConfig, shared: bool) -> str:
    """Call ``configure_threads``; return ``N threads, how they wait, because …``."""
    asked = dict(os.environ)
    num_threads = configure_threads(config, shared)
    return explain_threads(num_threads, config, shared, asked)


def explain_threads(
    num_threads: int,
    config: EngineConfig,
    shared: bool,
    asked: Mapping[str, str],
) -> str:
    """Explain the choice; ``asked`` is the environment before it."""
    if config.num_threads > 0:
        why = "engine.num_threads says so"
    elif "OMP_NUM_THREADS" in asked:
        why = "OMP_NUM_THREADS says so"
    elif shared:
        why = f"other processes of the system run on the {_named_cores()} too"
    else:
        why = f"nothing else is expected to run on the {_named_cores()}"
    if "OMP_WAIT_POLICY" in asked or "GOMP_SPINCOUNT" in asked:
        policy = "waiting as OMP_WAIT_POLICY and GOMP_SPINCOUNT say"
    else:
        policy = "asleep while they wait" if shared else "asleep after a moment of waiting"
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"{threads}, {policy}, because {why}"


def _named_cores() -> str:
    cores = usable_cores()
    return "1 core" if cores == 1 else f"{cores} cores"
