"""Rerun of a few failed tests after a red run, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_CONFTEST = "from tests.runner.rerun import pytest_sessionfinish as pytest_sessionfinish\n"
_FLAKY = """
from pathlib import Path

def test_flaky():
    seen = Path(__file__).with_name("seen")
    again = seen.exists()
    seen.touch()
    assert again
"""
_PASSING = "def test_passing():\n    pass\n"
_RED = "def test_red():\n    assert False\n"
_MANY = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_red(number):
    assert False
"""
_STOPPED = "import pytest\n\ndef test_stopped():\n    pytest.exit('out of memory', returncode=3)\n"


def _run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        # Loading all the plugins of this environment would take longer than the tests.
        env={**env, "PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100.0,
    )


def _project(folder: Path, **tests: str) -> Path:
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_passes_alone_is_named_as_flaky(tmp_path: Path, processes: str) -> None:
    project = _project(tmp_path, flaky=_FLAKY, passing=_PASSING)
    assert _run(project, "pytest", "-p", "xdist", "--numprocesses", processes).returncode == 1
    again = _run(project, "tests.runner.rerun")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "FLAKY test_flaky.py::test_flaky" in again.stdout
    assert "1 tests passed only on a second run." in again.stdout


def test_what_fails_again_stays_red(tmp_path: Path) -> None:
    project = _project(tmp_path, flaky=_FLAKY, red=_RED)
    assert _run(project, "pytest").returncode == 1
    again = _run(project, "tests.runner.rerun")
    assert again.returncode == 1
    assert "FAILED TWICE test_red.py::test_red" in again.stdout


def test_more_than_a_few_are_not_run_again(tmp_path: Path) -> None:
    project = _project(tmp_path, red=_MANY)
    assert _run(project, "pytest").returncode == 1
    again = _run(project, "tests.runner.rerun")
    assert again.returncode == 1
    assert "4 tests failed; only up to 3 are run again." in again.stdout


@pytest.mark.parametrize(
    "tests", [{"stopped": _STOPPED}, {"broken": "import nothing_of_that_name"}]
)
def test_a_run_that_did_not_end_is_not_forgiven(tmp_path: Path, tests: dict[str, str]) -> None:
    project = _project(tmp_path, **tests)
    assert _run(project, "pytest").returncode not in {0, 1}
    again = _run(project, "tests.runner.rerun")
    assert again.returncode == 1
    assert "did not run to their end" in again.stdout
