"""A short run of ``benchmarks.books``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (
    *("rows of requests", "accepted, by clients", "usage of answers", "generations"),
    *("Kafka's records", "usage_by_minute", "millrace usage", "invoice", "budget"),
    "operations page",
)


@pytest.mark.slow(reason="serves two models on a whole system, and kills parts of it")
@pytest.mark.timeout(480)
def test_every_source_tells_the_same_figures() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.books", "--rounds", "2"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=470.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill -9") == 3
    lines = done.stdout.splitlines()
    for source in _SOURCES:
        assert [line.split()[-1] for line in lines if line.startswith(source)] == ["0", "0"]
