"""Evidence that the choice of tests misses none: what tests execute, held against what is chosen.

    python -m tests.runner.proof measure DATA     run every test under coverage
    python -m tests.runner.proof commits DATA     replay the last commits that changed code
    python -m tests.runner.proof mutations DATA   break changed functions, and run their tests
    python -m tests.runner.proof tiers DATA       coverage of the fast tier, and of all tests

``measure`` records the lines and branches that each test executes, also in the processes that it
starts. A process that is killed by SIGKILL leaves no record.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import sqlite3
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.runner.changes import git
from tests.runner.choice import Selector
from tests.runner.measured import Measured
from tests.support.repository import PACKAGES, ROOT

_CODE = (".py", ".sql", ".lua", ".cpp", ".h", ".js", ".css", ".html", ".yaml")
_CONFIG = """\
[run]
branch = true
parallel = true
relative_files = true
source = {root}
omit =
    {root}/.venv/*
    {root}/tests/*
    {root}/benchmarks/*
data_file = {data}/coverage
context = ${{TEST_CONTEXT-}}
sigterm = true
disable_warnings = no-data-collected,module-not-measured,couldnt-parse,already-imported
"""
_PROCESSES = 3


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass
class Executed:
    """Executed code: for each path from the root, the arcs between its lines, and the ids of the
    tests that took each arc. The empty id stands for imports at collection."""

    arcs: dict[str, dict[tuple[int, int], set[str]]]

    @classmethod
    def read(cls, folder: Path) -> Executed:
        """Return the union of all files of data in a folder. A process that is killed while it
        writes leaves a damaged file, which is named and left out."""
        arcs: dict[str, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in sorted(folder.glob("coverage.*")):
            try:
                for path, context, begin, end in _rows(file):
                    arcs[path][begin, end].add(sys.intern(context))
            except sqlite3.DatabaseError as error:
                _say(f"Left out {file.name}: {error}")
        return cls(arcs)

    def tests_of(self, path: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that executed one of these lines of a file."""
        wanted = set(lines)
        found: set[str] = set()
        for (begin, end), tests in self.arcs.get(path, {}).items():
            if wanted & {begin, end}:
                found |= tests
        return found - {""}


def _rows(file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield path, context and arc of each row of one of coverage's files."""
    with sqlite3.connect(file) as connection:
        yield from connection.execute(
            "SELECT file.path, context.context, arc.fromno, arc.tono FROM arc "
            "JOIN file ON file.id = arc.file_id JOIN context ON context.id = arc.context_id"
        )
    connection.close()


def _statement_lines(text: str) -> dict[int, int]:
    """Map each line of a file to the line that coverage records: the first line of the innermost
    statement around it."""
    first: dict[int, int] = {}
    for node in ast.walk(ast.parse(text)):  # outer statements come before inner ones
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                first[line] = node.lineno
    return first


def _changed_lines(commit: str, path: str) -> set[int]:
    """Return the lines of today's file that this commit wrote, each by the first line of its
    statement. Coverage has lines of Python files only."""
    if not path.endswith(".py") or not (ROOT / path).is_file():
        return set()
    blamed = git("blame", "-l", "-s", f"{commit}^..HEAD", "--", path)
    lines = {
        number
        for number, line in enumerate(blamed.splitlines(), start=1)
        if line.startswith(commit)
    }
    first = _statement_lines((ROOT / path).read_text())
    return {first[line] for line in lines if line in first}


def _code_commits(number: int, newest: str) -> list[str]:
    """Return the last commits that changed files of code, from ``newest`` back, without merges."""
    found = []
    for commit in git("rev-list", "--no-merges", newest).splitlines():
        paths = _paths_of(commit)
        if any(path.endswith(_CODE) and not path.startswith("docs/") for path in paths):
            found.append(commit)
        if len(found) == number:
            break
    return found


def _paths_of(commit: str) -> list[str]:
    return git(
        "diff-tree", "--no-commit-id", "--name-only", "--no-renames", "-r", "--root", commit
    ).splitlines()


def _file(node_id: str) -> str:
    return node_id.split("::", 1)[0]


def replay_commits(executed: Executed, number: int, newest: str) -> int:
    """Print, for each commit, the numbers of test files that executed its lines and that are
    chosen; return the number of missed files."""
    selector, measured = Selector.of_repository(), Measured.read()
    misses, seconds = 0, []
    for commit in _code_commits(number, newest):
        paths = _paths_of(commit)
        expected: set[str] = set()
        for path in paths:
            lines = _changed_lines(commit, path)
            expected |= {_file(test) for test in executed.tests_of(path, lines)}
        chosen = selector.affected(paths)
        missed = {file for file in expected - chosen.keys() if (ROOT / file).is_file()}
        misses += len(missed)
        took_s = measured.fast_cpu_s(chosen)
        is_all = any(path.startswith(("schemas/", "runtime/")) for path in paths)
        if not is_all:
            seconds.append(took_s)
        names = ", ".join(sorted(missed)) or "none"
        _say(
            f"{commit[:10]} {len(paths):4} paths, {len(expected):4} test files executed them, "
            f"{len(chosen):4} chosen, {took_s:6.0f} CPU s of fast tests, missed: {names}"
        )
    if seconds:
        _say(f"Median without schemas/ and runtime/: {statistics.median(seconds):.0f} CPU s")
    _say(f"Misses: {misses}")
    return misses


@dataclass(frozen=True)
class Mutation:
    """Replacement of a text in a file by another."""

    path: str
    line: int
    begin: int
    end: int
    text: str


def _mutations(path: str, lines: set[int]) -> Iterator[Mutation]:
    """Yield mutations: reversed comparisons, results that become None, and numbers one too
    large."""
    source = (ROOT / path).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded, first = source.encode(), _statement_lines(source)
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            target: ast.expr | None = None
            new = ""
            if isinstance(node, ast.Return) and node.value is not None:
                target, new = node.value, "None"
            elif isinstance(node, ast.Compare):
                target, new = node, "(not ({}))"
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                target, new = node, f"{node.value + 1}"
            if target is None or first[target.lineno] not in lines:
                continue
            assert target.end_lineno is not None
            assert target.end_col_offset is not None
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            old = encoded[begin:end].decode()
            yield Mutation(path, first[target.lineno], begin, end, new.replace("{}", old))


def try_mutations(executed: Executed, number: int, newest: str, seed: int, most_tests: int) -> int:
    """Break functions that the last commits changed, one at a time, in this checkout; return the
    number of failed tests that were not chosen. The files are restored."""
    selector, draw = Selector.of_repository(), random.Random(seed)
    found: list[Mutation] = []
    for commit in _code_commits(60, newest):
        for path in _paths_of(commit):
            if path.split("/")[0] in PACKAGES and path.endswith(".py") and (ROOT / path).is_file():
                lines = _changed_lines(commit, path)
                found += [m for m in _mutations(path, lines) if executed.tests_of(path, [m.line])]
    misses = 0
    for mutation in draw.sample(found, number):
        tests = sorted(executed.tests_of(mutation.path, [mutation.line]))
        run = draw.sample(tests, min(most_tests, len(tests)))
        failed = _failing(mutation, run)
        chosen = selector.affected([mutation.path])
        missed = [test for test in failed if _file(test) not in chosen]
        misses += len(missed)
        _say(
            f"{mutation.path}:{mutation.line} -> {mutation.text[:40]!r}: {len(run)} of "
            f"{len(tests)} tests ran, {len(failed)} failed, missed: {', '.join(missed) or 'none'}"
        )
    _say(f"Misses: {misses}")
    return misses


def _failing(mutation: Mutation, tests: list[str]) -> list[str]:
    """Return the tests that fail with the mutation."""
    file = ROOT / mutation.path
    original = file.read_bytes()
    file.write_bytes(original[: mutation.begin] + mutation.text.encode() + original[mutation.end :])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        file.write_bytes(original)
    lines = done.stdout.splitlines()
    named = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return sorted({test for test in tests for line in named if line.startswith(test)})


def compare_tiers(executed: Executed, slow: set[str]) -> None:
    """Print line and branch coverage of the fast tier beside that of every test."""
    for name, left_out in (("every test", set[str]()), ("the fast tier", slow)):
        data = CoverageData(no_disk=True)
        data.add_arcs(
            {
                str(ROOT / path): [arc for arc, tests in arcs.items() if tests - left_out]
                for path, arcs in executed.arcs.items()
            }
        )
        lines, branches = _covered(data)
        _say(f"{name}: {lines:.2%} of lines, {branches:.2%} of branches")


def _covered(data: CoverageData) -> tuple[float, float]:
    """Return the shares of lines and of branches of our packages that were executed."""
    cover = Coverage(data_file=None, branch=True, config_file=False)
    cover.get_data().update(data)
    counts = [0, 0, 0, 0]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            numbers = cover._analyze(str(path)).numbers
            counts[0] += numbers.n_executed
            counts[1] += numbers.n_statements
            counts[2] += numbers.n_executed_branches
            counts[3] += numbers.n_branches
    return counts[0] / counts[1], counts[2] / counts[3]


def measure(data: Path, options: list[str]) -> int:
    """Run every test under coverage; return pytest's exit status."""
    data.mkdir(parents=True, exist_ok=True)
    config = data / "coveragerc"
    config.write_text(_CONFIG.format(root=ROOT, data=data.resolve()))
    environment = os.environ | {"COVERAGE_PROCESS_START": str(config.resolve()), "TEST_CONTEXT": ""}
    command = [sys.executable, "-m", "pytest", "--numprocesses", str(_PROCESSES), *options]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    """Run a command; return 0 if nothing was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.runner.proof", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("what", choices=("measure", "commits", "mutations", "tiers"))
    parser.add_argument("data", type=Path, help="the folder of what was executed")
    parser.add_argument("--number", type=int, help="commits (60) or mutations (20)")
    parser.add_argument("--newest", default="HEAD", help="the newest of the commits (HEAD)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-tests", type=int, default=20, help="tests run for a mutation")
    options, more = parser.parse_known_args()
    if options.what == "measure":
        return measure(options.data, more)
    executed = Executed.read(options.data)
    if options.what == "tiers":
        compare_tiers(executed, set(Measured.read().slow_test_s))
        return 0
    if options.what == "commits":
        return int(replay_commits(executed, options.number or 60, options.newest) > 0)
    number = options.number or 20
    misses = try_mutations(executed, number, options.newest, options.seed, options.most_tests)
    return int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
