"""Threads are chosen for the machine and for what else runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.config import EngineConfig
from workers.engine.threads import configure_threads, default_num_threads, usable_cores


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
    assert environ == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("_threads_restored")
def test_alone_on_the_machine_threads_spin_for_a_moment() -> None:
    environ: dict[str, str] = {}
    configure_threads(EngineConfig(num_threads=2), shared=False, environ=environ)
    assert environ == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "20000"}


@pytest.mark.usefixtures("_threads_restored")
def test_the_users_own_settings_stand() -> None:
    environ = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}
    assert configure_threads(EngineConfig(), shared=True, environ=environ) == 2
    assert environ == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}


def test_a_cgroup_quota_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    unlimited = usable_cores(quota)
    assert unlimited == usable_cores(tmp_path / "absent") >= 1
