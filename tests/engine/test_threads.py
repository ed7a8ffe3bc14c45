"""Choice of threads for the machine and for its other work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.engine.threads.choice import (
    configure_threads,
    default_num_threads,
    places,
    usable_cores,
)
from millrace.schemas.config import EngineConfig


@pytest.mark.parametrize(
    ("num_cores", "shared", "num_threads"),
    [(1, True, 1), (2, True, 2), (2, False, 2), (8, True, 6), (64, True, 16), (64, False, 16)],
)
def test_three_of_four_cores_of_a_shared_machine(
    num_cores: int, shared: bool, num_threads: int
) -> None:
    assert default_num_threads(num_cores, shared) == num_threads


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_restored")
def test_the_environment_says_what_openmp_reads() -> None:
    environ: dict[str, str] = {}
    assert configure_threads(EngineConfig(num_threads=3), shared=True, environ=environ) == 3
    assert (environ["OMP_NUM_THREADS"], environ["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("_threads_restored")
def test_alone_on_the_machine_threads_spin_for_a_moment() -> None:
    environ: dict[str, str] = {}
    configure_threads(EngineConfig(num_threads=2), shared=False, environ=environ)
    assert (environ["OMP_NUM_THREADS"], environ["GOMP_SPINCOUNT"]) == ("2", "20000")


@pytest.mark.usefixtures("_threads_restored")
def test_the_users_own_settings_stand() -> None:
    environ = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE", "OMP_PROC_BIND": "false"}
    own = dict(environ)
    assert configure_threads(EngineConfig(), shared=True, environ=environ) == 2
    assert environ == own


@pytest.mark.usefixtures("_threads_restored")
def test_threads_are_bound_where_each_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def binding(num_threads: int, **environ: str) -> str | None:
        configure_threads(EngineConfig(num_threads=num_threads), shared=True, environ=environ)
        return environ.get("OMP_PROC_BIND")

    monkeypatch.setattr("millrace.engine.threads.choice._cores", {0, 1, 2})
    assert binding(3) == "true"
    assert binding(2) is None, "a core is left to the others"
    assert binding(3, GOMP_CPU_AFFINITY="0-2") is None
    assert binding(3, OMP_PROC_BIND="false") == "false"
    monkeypatch.setattr("millrace.engine.threads.choice._cores", {0})
    assert binding(1) is None


def test_engines_beside_one_another_begin_at_other_cores() -> None:
    assert [places([2, 3, 5], number) for number in (7, 8, 9)] == [
        "{3},{5},{2}",
        "{5},{2},{3}",
        "{2},{3},{5}",
    ]


_BOUND = """
import os, threading
from millrace.schemas.config import EngineConfig
from millrace.engine.threads.choice import configure_threads, leave_core, usable_cores
num_cores = usable_cores()
configure_threads(EngineConfig(), shared=False, environ=None)
import torch
torch.ones(512, 512) @ torch.ones(512, 512)
free = []
thread = threading.Thread(target=lambda: (leave_core(), free.append(os.sched_getaffinity(0))))
thread.start()
thread.join()
print(num_cores, len(os.sched_getaffinity(0)), len(free[0]), torch.get_num_threads())
"""


def test_the_engines_threads_stay_and_others_leave() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", _BOUND], env=environ, check=True, capture_output=True, text=True
    )
    num_cores, num_own, num_free, num_threads = map(int, done.stdout.split())
    assert num_free == num_cores
    assert num_own == (1 if num_threads == num_cores else num_cores)


def test_a_cgroup_quota_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    unlimited = usable_cores(quota)
    assert unlimited == usable_cores(tmp_path / "absent") >= 1
