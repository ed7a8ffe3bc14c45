"""Choice of a run's slow tests, and the run's report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runner.cpu_times import Meter, Seconds, tree_cpu_s
from tests.runner.measured import Measured, Room, measured_run
from tests.runner.tiers import (
    MOST_AFFECTED_S,
    SHARES,
    SlowShare,
    share_of,
    slow_reason,
    taken,
)
from tests.support.repository import ROOT

_NOTHING = Measured("a CPU", {}, {})
_IDS = st.sets(st.text("abc/:", min_size=1, max_size=8).map("tests/{}.py::test_it".format))


@given(_IDS)
def test_every_slow_test_runs_in_one_of_ten_shares(slow: set[str]) -> None:
    runs = [taken(slow, SlowShare(share, {}), _NOTHING) for share in range(SHARES)]
    assert sum(len(run) for run in runs) == len(slow)
    assert set().union(*runs) == slow


def test_shares_are_about_equal() -> None:
    counts = [0] * SHARES
    for number in range(1000):
        counts[share_of(f"tests/test_it.py::test_it[{number}]")] += 1
    assert max(counts) < 2 * min(counts)


def test_affected_tests_run_the_nearest_first_until_the_time_is_used_up() -> None:
    ids = [f"tests/{name}.py::test_it" for name in ("far", "near", "nearer", "unaffected")]
    third_s = MOST_AFFECTED_S / 2 - 1
    measured = Measured("a CPU", {}, dict.fromkeys(ids, third_s))
    distances = {"tests/far.py": 9, "tests/near.py": 2, "tests/nearer.py": 1}
    shares = {share_of(node_id) for node_id in ids}
    unused = next(share for share in range(SHARES) if share not in shares)
    chosen = taken(ids, SlowShare(unused, distances), measured)
    assert chosen == {"tests/near.py::test_it", "tests/nearer.py::test_it"}


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    times = {
        "tests/a.py::one": Seconds(1.0, 2.0),
        "tests/a.py::two": Seconds(0.5, 0.5),
        "tests/b.py::one": Seconds(20.0, 9.0),
    }
    run = measured_run(times, {"tests/b.py::one", "tests/c.py::not_run"})
    run.write(tmp_path / "measured.json")
    read = Measured.read(tmp_path / "measured.json")
    assert read == run
    assert read.rooms == {"tests/a.py": Room(1.5, 2.5, 2), "tests/b.py": Room(20.0, 9.0, 1)}
    assert read.slow_test_s == {"tests/b.py::one": 20.0}


_BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_cpu_time_counts_processes_that_run_and_that_ended() -> None:
    meter = Meter()
    subprocess.run([sys.executable, "-c", _BUSY], check=True)
    ended = meter.lap()
    assert ended.cpu_s >= 0.4
    with subprocess.Popen(
        [sys.executable, "-c", f"{_BUSY}\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        alive_s = meter.lap().cpu_s
        running.communicate(b"\n")
    assert alive_s >= 0.4
    assert meter.lap().cpu_s < 0.3
    assert tree_cpu_s() > 0.6


_PROJECT = """
import pytest

def test_fast():
    pass

@pytest.mark.slow(reason="it is an example")
@pytest.mark.parametrize("number", range(100))
def test_slow(number):
    pass
"""
_CONFTEST = """
from tests.runner.plugin import pytest_addoption as pytest_addoption
from tests.runner.plugin import pytest_configure as pytest_configure
"""


def _run(project: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (project / "conftest.py").write_text(_CONFTEST)
    (project / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: with a reason\n")
    (project / "test_it.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", *options],
        cwd=project,
        # Loading all the plugins of this environment would take longer than the tests.
        env={**env, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100.0,
    )


def test_a_plain_run_takes_all(tmp_path: Path) -> None:
    done = _run(tmp_path, _PROJECT)
    assert "101 passed" in done.stdout, done.stdout + done.stderr


def test_the_fast_tier_alone(tmp_path: Path) -> None:
    done = _run(tmp_path, _PROJECT, "--slow", "none")
    assert "1 passed, 100 deselected" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_share_of_the_slow_tests_is_the_same_in_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """A checkout without git takes the first share."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    options = ("--slow", "some", "-n", processes, "--cpu-times")
    done = _run(tmp_path, _PROJECT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    number = sum(share_of(f"test_it.py::test_slow[{n}]") == 0 for n in range(100))
    assert f"{number + 1} passed" in done.stdout, done.stdout
    assert f"Slow tier: {number} of 100 tests were chosen" in done.stdout
    assert "test_it.py" in done.stdout[done.stdout.index("CPU s") :]


class _Item:
    nodeid = "tests/test_it.py::test_it"

    def __init__(self, mark: pytest.MarkDecorator) -> None:
        self._mark = mark.mark

    def get_closest_marker(self, _name: str) -> pytest.Mark:
        return self._mark


_SLOW = pytest.mark.slow


@pytest.mark.parametrize("mark", [_SLOW, _SLOW("why"), _SLOW(reason=""), _SLOW(reason=3)])
def test_a_slow_test_says_why(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match="say why"):
        slow_reason(cast(pytest.Item, _Item(mark)))
    assert slow_reason(cast(pytest.Item, _Item(_SLOW(reason="why")))) == "why"


def test_a_base_that_is_no_commit_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="--base no-such-commit"):
        SlowShare.of_checkout("no-such-commit")
