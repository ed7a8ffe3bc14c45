"""Says with how many threads the engine computes, how they wait, and what that was chosen by."""

from __future__ import annotations

import os
from collections.abc import Mapping

from millrace.engine.threads.choice import configure_threads, usable_cores
from millrace.schemas.config import EngineConfig


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
        why = f"other processes of the system run on the {_cores()} too"
    else:
        why = f"nothing else is expected to run on the {_cores()}"
    if "OMP_WAIT_POLICY" in asked or "GOMP_SPINCOUNT" in asked:
        policy = "waiting as OMP_WAIT_POLICY and GOMP_SPINCOUNT say"
    else:
        policy = "asleep while they wait" if shared else "asleep after a moment of waiting"
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"{threads}, {policy}, because {why}"


def _cores() -> str:
    cores = usable_cores()
    return "1 core" if cores == 1 else f"{cores} cores"
