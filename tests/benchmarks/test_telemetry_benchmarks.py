"""The benchmarks of the telemetry path run from end to end; their counts hold, and their times here
mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SAID = {
    "sink": ("the whole sink", "rows/s of one core"),
    "outage": ("ClickHouse is back", "caught up in", "0 missing, 0 double"),
    "endpoint": ("light_p95_s", "page_failures", "sink_lag_max_s"),
    "chaos": ("telemetry killed", "kafka killed", "0 missing, 0 double"),
    "cost": ("of the worker's CPU", "of a core (goal 1%)"),
}


@pytest.mark.slow(reason="smoke runs of benchmarks, which promise nothing to users")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", _SAID)
def test_a_smoke_run_says_everything(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.telemetry", "--only", name, "--smoke"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=170.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in _SAID[name]:
        assert words in done.stdout
