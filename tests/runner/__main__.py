"""Run the tests that a change can affect.

    python -m tests.runner [--base COMMIT] [--explain] [--list] [-- PYTEST OPTIONS]

The change is all that differs from the base: commits, the working tree and new files.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.runner.changes import NoHistoryError, change_since, default_base
from tests.runner.choice import Chosen, Selector, files_of_tests
from tests.runner.measured import Measured


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.runner", description="Run the tests that a change can affect."
    )
    parser.add_argument(
        "--base",
        default=None,
        help="the commit since which files count as changed (default: where the branch left "
        "origin/main, or else the newest commit that is over six hours old)",
    )
    parser.add_argument("--explain", action="store_true", help="say why each file was chosen")
    parser.add_argument("--list", action="store_true", help="only print the chosen files")
    parser.add_argument("--slow", default="none", help="as for pytest: all, some or none (default)")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --")
    return parser.parse_args(arguments)


def _print_choice(chosen: dict[str, Chosen], *, explain: bool) -> None:
    measured = Measured.read()
    rooms = [measured.rooms[file] for file in chosen if file in measured.rooms]
    num_tests = sum(room.tests for room in rooms)
    _say(
        f"{num_tests} tests in {len(chosen)} of {len(files_of_tests())} files can be affected; "
        f"the fast ones took {measured.fast_cpu_s(chosen):.0f} s of CPU when they were measured."
    )
    for file, why in chosen.items() if explain else ():
        _say(f"  {file}: {why.reason}")


def main(arguments: list[str] | None = None) -> int:
    """Choose and run the tests; return the exit status of pytest, or 0 if there is nothing to
    run."""
    options = _parsed(arguments)
    try:
        change = change_since(options.base or default_base())
    except NoHistoryError as error:
        _say(f"{error} Name the commit to compare with: --base COMMIT (make: BASE=COMMIT).")
        return 2
    chosen = Selector.of_repository(change.deleted).affected(change.paths)
    if options.list:
        for file in chosen:
            _say(file)
        return 0
    _say(f"{len(change.paths)} files differ from {change.base[:10]}.")
    _print_choice(chosen, explain=options.explain)
    if not chosen:
        return 0
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "--slow", options.slow, *options.pytest, *chosen]
    return os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
