"""Selection of test files by a change: by imports, by names in strings, and by the table."""

from __future__ import annotations

import subprocess
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from tests.runner import __main__ as command
from tests.runner.changes import Change, NoHistoryError, change_since, default_base
from tests.runner.choice import Selector, files_of_tests
from tests.runner.imports import ImportGraph, Source, module_name, source_of
from tests.runner.rules import ALWAYS, EVERYTHING, RULES, targets
from tests.support.repository import ROOT


def _graph(**files: str) -> ImportGraph:
    """Return a graph of modules by their names, with ``_0_`` for dots."""
    named = {name.replace("_0_", "."): text for name, text in files.items()}
    return ImportGraph({name: source_of(name, text) for name, text in named.items()})


@pytest.mark.parametrize(
    "text",
    [
        "import millrace.bus.codec",
        "from millrace.bus import codec",
        "from millrace.bus.codec import encode",
        "def later():\n    from millrace.bus import codec",
        "from importlib import import_module\nimport_module('millrace.bus.codec')",
        "command = ['python', '-m', 'millrace.bus.codec']",
        "command = ('-m', 'millrace.bus')",
        "command = 'python -m millrace.bus.codec --once'",
        "entry_point = 'millrace.bus.codec:main'",
        "start(f'millrace.{package}')",
        "from millrace import bus\nimport_module(f'{bus.__name__}.{name}')",
    ],
)
def test_every_way_to_load_a_module_is_an_edge(text: str) -> None:
    graph = _graph(millrace_0_bus_0_codec="", millrace_0_bus="", tests_0_test_it=text)
    assert "tests.test_it" in graph.affected(["millrace.bus.codec"])


@pytest.mark.parametrize(
    "text",
    [
        '"""Run it with python -m millrace.bus.codec."""',
        "if TYPE_CHECKING:\n    from millrace.bus import codec",
        "import typing\nif typing.TYPE_CHECKING:\n    import millrace.bus.codec",
        "path = 'millrace/bus/codec'",
        "database = 'millrace'",
        "topic = 'millrace.bus.v1'",
    ],
)
def test_what_loads_nothing_is_no_edge(text: str) -> None:
    graph = _graph(millrace_0_bus_0_codec="", millrace_0_bus="", tests_0_test_it=text)
    assert "tests.test_it" not in graph.affected(["millrace.bus.codec"])


def test_a_relative_import_counts_from_the_package() -> None:
    graph = ImportGraph(
        {
            "tests.room": source_of("tests.room", "from .helper import help", is_package=True),
            "tests.room.helper": Source(),
            "tests.room.test_it": source_of("tests.room.test_it", "from ..other import that"),
            "tests.other": Source(),
        }
    )
    assert set(graph.affected(["tests.other"])) == {"tests.other", "tests.room.test_it"}
    assert "tests.room" in graph.affected(["tests.room.helper"])


def test_the_command_and_its_script_start_everything() -> None:
    starts = ["command = ['python', '-m', 'millrace']", "path = Path('.venv', 'bin', 'millrace')"]
    for text in starts:
        graph = _graph(
            millrace_0___main__="import millrace.cli", millrace_0_cli="", tests_0_test_it=text
        )
        assert "tests.test_it" in graph.affected(["millrace.cli"])


def test_a_chain_is_the_shortest_one() -> None:
    graph = _graph(
        tests_0_a="", tests_0_b="import tests.a", tests_0_test_it="import tests.b\nimport tests.a"
    )
    assert graph.affected(["tests.a"])["tests.test_it"] == ("tests.a", "tests.test_it")


@cache
def _selector() -> Selector:
    return Selector.of_repository(["bus/gone.py"])


def _chosen(*paths: str, exact: bool = False) -> set[str]:
    return set(_selector().affected(paths, exact=exact))


@pytest.mark.parametrize(
    "path",
    [
        "schemas/jobs/job.py",
        "runtime/clock.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/support/servers.py",
        "tests/runner/plugin.py",
        "a_new_kind_of_file.xyz",
    ],
)
def test_what_all_tests_stand_on_selects_them_all(path: str) -> None:
    assert _chosen(path) == set(files_of_tests())
    assert _chosen(path, exact=True) != set(files_of_tests())


@pytest.mark.parametrize(
    ("path", "affected", "unaffected"),
    [
        ("telemetry/sink/sink.py", "tests/telemetry/sink/test_sink.py", "tests/gateway/page/"),
        ("gateway/web/chat/page.css", "tests/gateway/page/test_chats.py", "tests/engine/kernels/"),
        ("telemetry/queries/usage.sql", "tests/telemetry/queries/test_queries.py", "tests/bus/"),
        ("bus/tenancy/settle.lua", "tests/gateway/tenancy/test_limits.py", "tests/engine/models/"),
        ("engine/kernels/native/x.cpp", "tests/engine/kernels/test_products.py", "tests/bus/"),
        ("scheduler/fleet/fleet.py", "tests/e2e/test_kill.py", "tests/engine/kv/"),
        ("docs/cost.md", "tests/telemetry/queries/test_cost_page.py", "tests/e2e/"),
        ("tests/engine/conftest.py", "tests/engine/models/test_loader.py", "tests/bus/"),
        ("tests/bus/test_jobs.py", "tests/bus/test_jobs.py", "tests/bus/nats/"),
    ],
)
def test_a_change_selects_its_tests_and_not_others(
    path: str, affected: str, unaffected: str
) -> None:
    chosen = _chosen(path)
    assert affected in chosen
    assert not [file for file in chosen if file.startswith(unaffected)]


def test_tests_that_read_the_files_are_always_chosen() -> None:
    always = {f for f in files_of_tests() if any(fnmatchcase(f, p) for p in ALWAYS)}
    assert always
    assert _chosen("LICENSE") == always
    assert _chosen() == set()


def test_importers_of_a_deleted_module_are_chosen() -> None:
    graph = ImportGraph(
        {"millrace.bus.gone": Source(), "tests.test_it": Source({"millrace.bus.gone"})}
    )
    selector = Selector(graph, ["tests/test_it.py"])
    assert set(selector.affected(["bus/gone.py"])) == {"tests/test_it.py"}


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def test_the_table_has_every_file_that_is_no_module() -> None:
    others = [path for path in _tracked() if module_name(path) is None]
    assert others
    assert [path for path in others if targets(path) is None] == []


@pytest.mark.parametrize(("pattern", "found"), RULES)
def test_a_rule_has_files_and_targets(pattern: str, found: tuple[str, ...]) -> None:
    assert [path for path in _tracked() if fnmatchcase(path, pattern)], pattern
    for target in found:
        if target == EVERYTHING:
            continue
        assert [path for path in _tracked() if fnmatchcase(path, target)], target


def _commit(folder: Path, message: str, date: str) -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words],
            cwd=folder,
            env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    if not (folder / ".git").exists():
        git("init", "--quiet", "--initial-branch=main")
    (folder / "file").write_text(message)
    git("add", "--all")
    git("commit", "--quiet", "--message", message)
    return git("rev-parse", "HEAD")


_LONG_AGO = "2026-01-01T00:00:00+0000"
_FAR_AHEAD = "2099-01-01T00:00:00+0000"


def test_the_change_begins_at_the_newest_settled_commit(tmp_path: Path) -> None:
    _commit(tmp_path, "first", _LONG_AGO)
    settled = _commit(tmp_path, "second", _LONG_AGO)
    _commit(tmp_path, "third", _FAR_AHEAD)
    assert default_base(tmp_path) == settled


def test_the_change_begins_where_the_branch_left_its_origin(tmp_path: Path) -> None:
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    _commit(origin, "first", _LONG_AGO)
    pushed = _commit(origin, "second", _FAR_AHEAD)
    subprocess.run(["git", "clone", "--quiet", origin, clone], check=True, capture_output=True)
    # A clone of the tested commit itself: nothing lies between it and its origin.
    assert default_base(clone) != pushed
    _commit(clone, "third", _FAR_AHEAD)
    assert default_base(clone) == pushed
    shallow = tmp_path / "shallow"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", f"file://{origin}", shallow],
        check=True,
        capture_output=True,
    )
    with pytest.raises(NoHistoryError, match="shallow"):
        default_base(shallow)


def test_without_settled_commits_or_git_there_is_no_change(tmp_path: Path) -> None:
    with pytest.raises(NoHistoryError):
        default_base(tmp_path)
    _commit(tmp_path, "first", _FAR_AHEAD)
    with pytest.raises(NoHistoryError, match="younger than six hours"):
        default_base(tmp_path)


def test_a_change_is_of_commits_the_working_tree_and_new_files(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    base = _commit(tmp_path, "first", _LONG_AGO)
    _commit(tmp_path, "second", _LONG_AGO)
    (tmp_path / "new").touch()
    (tmp_path / "old").unlink()
    change = change_since(base, tmp_path)
    assert change == Change(base, ("file", "new", "old"), ("old",))
    with pytest.raises(NoHistoryError):
        change_since("no-such-commit", tmp_path)


def _have_changed(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Make the command find that these paths have changed, in a graph that is read already."""
    monkeypatch.setattr(command, "change_since", lambda _: Change("0" * 40, paths, ()))
    monkeypatch.setattr(Selector, "of_repository", lambda _: _selector())


def test_the_command_lists_the_chosen_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _have_changed(monkeypatch, "tests/bus/test_jobs.py")
    assert command.main(["--base", "HEAD", "--list"]) == 0
    assert "tests/bus/test_jobs.py" in capsys.readouterr().out.splitlines()


def test_the_command_runs_pytest_on_the_chosen_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _have_changed(monkeypatch, "tests/bus/test_jobs.py")
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, words: ran.append(words))
    command.main(["--base", "HEAD", "--explain", "--", "--exitfirst"])
    assert "tests/bus/test_jobs.py: tests/bus/test_jobs.py" in capsys.readouterr().out
    assert ran[0][1:6] == ["-m", "pytest", "--slow", "none", "--exitfirst"]
    assert "tests/bus/test_jobs.py" in ran[0]


def test_the_command_asks_for_a_base_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--base", "no-such-commit"]) == 2
    assert "--base COMMIT" in capsys.readouterr().out
