"""The benchmark of GPUs runs to its end without one, with tiny models in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import SECTIONS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow(reason="runs benchmarks of GPU kernels in Triton's interpreter")


def run(*arguments: str) -> str:
    """Run a benchmark module and return its output; the run must succeed."""
    finished = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.timeout(300)
def test_all_sections_run_and_are_right(tmp_path: Path) -> None:
    output = run("benchmarks.gpu", "--smoke", "--out", str(tmp_path))
    report = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=Report)
    assert report.smoke
    assert list(report.section_s) == [section.name for section in SECTIONS]
    assert {row.section for row in report.rows} == set(report.section_s)
    assert not [row for row in report.rows if row.failure]
    assert report.environment is not None
    assert report.ceilings is not None
    assert (tmp_path / "gpu.txt").read_text() == output
    assert "not judged in a smoke run" in output


def test_candidates_are_timed_beside_the_present_tile(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    output = run(
        *("benchmarks.gpu", "--smoke", "--save", str(path), "--only", "tiles"),
        *("--kernels", "decode attention, 64", "rms_norm", "int4 qkv, 3"),
    )
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    swept = [row for row in report.rows if row.section == "tiles"]
    names = ["rms_norm, 3 x 64", "add_rms_norm, 3 x 64", "int4 qkv, 3 rows"]
    assert [row.name for row in swept][1:] == names
    for row in swept:
        times = [time_us for name, time_us in row.details.items() if name.startswith("(")]
        assert len(times) == 2
        assert all(isinstance(time_us, float) for time_us in times), times
        assert row.value is not None
        assert row.value > 0
    assert "of the present tile" in output
