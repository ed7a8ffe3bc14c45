"""The benchmarks of the scheduler run from end to end, on real servers or in virtual time; their
figures here mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduler.fairness import largest_gap
from millrace.simulation.report.fairness import jain

_ROOT = Path(__file__).resolve().parents[2]
_SAID = {
    "scheduler --only dispatch": ("Millrace, 1 tenants", "/s of one core"),
    "scheduler --only neighbours backlog": ("Jain index of the work", "VTC's bound", "TTFT behind"),
    "scheduler --only replicas": ("one is killed", "VTC's bound", "Jain index of all phases"),
    "scheduler --only lines": ("100 done", "first token of another tenant"),
    "scheduler --only preemption": ("TTFT beside the free streams", "goal"),
    "scheduler --only affinity": ("affine / least_loaded", "ceiling"),
    "simulated_roles": ("derived, not measured", "16 mixed", "8 + 8, 1.6 GB/s", "good", "TTFT"),
}


@pytest.mark.slow(reason="runs each benchmark of the scheduler from end to end")
@pytest.mark.parametrize("name", _SAID)
def test_a_smoke_run_says_everything(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{name} --smoke".split()],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=90.0,
    )
    assert done.returncode == 0, done.stderr
    for words in _SAID[name]:
        assert words in done.stdout


@pytest.mark.parametrize(
    ("shares", "index"),
    [([5.0, 5.0, 5.0], 1.0), ([9.0, 0.0, 0.0], 1 / 3), ([3.0, 1.0], 0.8), ([0.0, 0.0], 1.0)],
)
def test_jains_index(shares: list[float], index: float) -> None:
    assert jain(np.array(shares)) == pytest.approx(index)


def test_a_gap_is_of_whichever_part_of_the_time() -> None:
    # Behind by 4 first, ahead by 6 later: it got 10 more in between.
    assert largest_gap([0, 1, 20, 20], [0, 5, 14, 15]) == 10
    assert largest_gap([0, 5, 9], [0, 5, 9]) == 0
