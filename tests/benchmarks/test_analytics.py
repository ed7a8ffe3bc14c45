"""The benchmark of the saved queries runs from end to end; its figures here mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow(reason="a smoke run of a benchmark, which promises nothing to users")
def test_a_smoke_run_times_every_query() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.telemetry", "--only", "analytics", "--smoke"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=180.0,
    )
    assert done.returncode == 0, done.stderr
    assert "5,000 requests" in done.stdout
    for file in (_ROOT / "telemetry" / "queries").glob("*.sql"):
        assert f"\n{file.stem} " in done.stdout
