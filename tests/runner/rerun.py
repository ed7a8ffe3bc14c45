"""Runs each test that failed in the last run once more, alone.

    python -m tests.runner.rerun

What passes now is flaky: it is printed as such, is a defect, and is forgiven for three tests at
most. A run that ended in any other way than with failed tests is not forgiven.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(".pytest_cache/v")
EXIT_STATUS_KEY = "millrace/exit_status"
MOST_FLAKY = 3


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Store how the run ended; ``tests/conftest.py`` hands this hook to pytest."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set(EXIT_STATUS_KEY, int(exitstatus))


def failed_tests(cache: Path) -> list[str] | None:
    """Return the node ids that failed in the last run, or None unless it ran to its end and some
    failed."""
    try:
        status = json.loads((cache / EXIT_STATUS_KEY).read_text())
        failed = json.loads((cache / "cache" / "lastfailed").read_text())
    except FileNotFoundError:
        return None
    return sorted(failed) if status == pytest.ExitCode.TESTS_FAILED and failed else None


def passes_alone(node_id: str) -> bool:
    """Return whether the test passes in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", node_id]
    return subprocess.run(command, check=False).returncode == pytest.ExitCode.OK


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the failed tests again; return 0 if they are few and all pass alone, else 1."""
    failed = failed_tests(CACHE)
    if failed is None:
        _say("The tests did not run to their end: nothing is run again.")
        return 1
    if len(failed) > MOST_FLAKY:
        _say(f"{len(failed)} tests failed; only up to {MOST_FLAKY} are run again.")
        return 1
    red = [node_id for node_id in failed if not passes_alone(node_id)]
    for node_id in failed:
        _say(f"{'FAILED TWICE' if node_id in red else 'FLAKY'} {node_id}")
    _say(f"{len(failed) - len(red)} tests passed only on a second run. Each is a defect.")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
