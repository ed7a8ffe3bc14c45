"""Path of a chat request: the number of its files and functions does not grow."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.suite.request_path import Function, report
from tests.support.repository import ROOT

# Lower these when a change makes the way shorter: `python -m tests.suite.request_path`. A few
# functions more or less are a matter of how threads take turns.
MAX_FILES = 200
MAX_FUNCTIONS = 990

_STATIONS = (
    "gateway/api/generations.py",
    "registry/requests/parsing.py",
    "scheduler/stages/pull.py",
    "workers/host/requests.py",
    "engine/scheduling/planner.py",
    "workers/host/endings/finalizer.py",
)


def test_the_way_of_a_request_does_not_grow() -> None:
    command = [sys.executable, "-m", "tests.suite.request_path", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300.0)
    assert done.returncode == 0, done.stderr
    functions = [Function(*one) for one in json.loads(done.stdout)]
    files = {one.file for one in functions}
    assert files.issuperset(_STATIONS)
    assert len(files) <= MAX_FILES, report(functions)
    assert len(functions) <= MAX_FUNCTIONS, report(functions, names=True)


def test_a_report_counts_by_package() -> None:
    functions = [
        Function("bus/codec.py", "encode"),
        Function("gateway/app.py", "app"),
        Function("gateway/app.py", "_counted"),
    ]
    text = report(functions)
    assert "bus: 1 files, 1 functions" in text
    assert "gateway: 1 files, 2 functions" in text
    assert text.endswith("in all: 2 files, 3 functions\n")
