"""How many threads the engine computes with, chosen before torch starts them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from millrace.schemas.config import EngineConfig

_MAX_DEFAULT_THREADS = 16
_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# Turns of GNU OpenMP's waiting loop, some tenths of a millisecond: long enough for the gaps between
# the operations of a step, so that no thread has to be woken inside it (with 2,000 turns a step of
# 11 ms took 25), and short beside a time slice.
_SPIN_COUNT = "20000"
# By which a user binds threads to cores himself.
_BINDING = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
_cores: set[int] = set()
# Of each rank of a group, those that its threads are bound to, for OMP_PLACES; none are if empty.
_places_of_ranks: list[str] = []


def configure_threads(
    config: EngineConfig, shared: bool, environ: MutableMapping[str, str] | None = None
) -> int:
    """Fix the number of compute threads for this process and the ones it starts; returns it.

    Must be called before torch is imported: OpenMP reads its environment once. ``shared`` says
    that other processes of the system run on the machine: of four cores they get one.
    ``num_threads`` above 0 is taken as it is; what the user has put into OMP_* and GOMP_* himself
    is respected otherwise.

    Threads that wait for the next operation sleep on a shared machine; else they spin for a moment
    first. By OpenMP's default they spin for milliseconds, in the way of the very thread they wait
    for when another process is busy: two threads beside one made a step of a 100M model take
    155 ms instead of 19.

    Where there is a thread for each core that this process may run on, each is bound to one. Two
    that wait for each other may else be kept on one core for as long as they run, while the other
    has nothing, or something of low priority, to do: Linux takes that for busy. Beside such work
    half of the starts on 2 cores made steps three times as long. Threads that are no part of the
    team ``leave_core``. The ranks of a group that are on this host share the cores, each with its
    own.
    """
    environ = os.environ if environ is None else environ
    num_stages = config.pipeline_parallel - config.remote_stages
    num_ranks = max(1, config.tensor_parallel * num_stages)
    if not _cores:  # a thread that is bound sees one only
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
    """What the environment of another rank's process has for its threads, beside this one's."""
    return {"OMP_PLACES": _places_of_ranks[rank]} if rank < len(_places_of_ranks) else {}


def cores_of_process() -> set[int]:
    """The cores that this process may use, whatever its threads are bound to."""
    return _cores or os.sched_getaffinity(0)


def places(cores: Sequence[int], number: int) -> str:
    """The cores in turn, for OMP_PLACES. Engines of other numbers begin at other cores: the first
    thread of each does more than the rest."""
    first = number % len(cores)
    return ",".join(f"{{{core}}}" for core in (*cores[first:], *cores[:first]))


def leave_core() -> None:
    """Let the thread that calls run on any core that this process may use. A thread begins on the
    core of the one that started it, which is the engine's own."""
    if _cores:
        os.sched_setaffinity(0, _cores)


def default_num_threads(num_cores: int, shared: bool) -> int:
    """All cores, or three of four on a shared machine; at least 1, at most 16."""
    return max(1, min(num_cores - num_cores // 4 * shared, _MAX_DEFAULT_THREADS))


def usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Cores that this process may run on: its affinity, and the quota of its cgroup if any."""
    cores = len(os.sched_getaffinity(0))
    if cpu_max.is_file():
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.floor(int(quota) / int(period))))
    return cores


def choose_threads(config: EngineConfig, shared: bool) -> str:
    """See ``configure_threads``; returns ``N threads, how they wait, because …``."""
    asked = dict(os.environ)
    num_threads = configure_threads(config, shared)
    return explain_threads(num_threads, config, shared, asked)


def explain_threads(
    num_threads: int,
    config: EngineConfig,
    shared: bool,
    asked: Mapping[str, str],
) -> str:
    """``asked`` is the environment before the choice."""
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
