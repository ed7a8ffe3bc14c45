"""Structure of the code: no import runs in a circle, and every package has a docstring."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.repository import PACKAGES, ROOT, python_files

_BY_NAME = ("files", "import_module", "find_spec", "getLogger", "python_command")


def module_name(path: Path) -> str:
    parts = ("millrace", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported(source: str, modules: set[str]) -> set[str]:
    """Return the ``modules`` that a file imports anywhere, even for type checkers only."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {whole if whole in modules else node.module for whole in wholes}
    return names & modules


def circle(sources: dict[str, str]) -> list[str]:
    """Find modules, given by name with their text, each of which imports the one before it."""
    graph = {name: imported(text, sources.keys() - {name}) for name, text in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_a_circle_is_found() -> None:
    first = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room import second\n"
    sources = {"room.first": first, "room.second": "import room.first\n"}
    assert set(circle(sources)) == set(sources)
    assert not circle(sources | {"room.second": "import os\n"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_in_a_circle(package: str) -> None:
    sources = {module_name(path): path.read_text() for path in python_files(package)}
    assert any(imported(text, sources.keys() - {name}) for name, text in sources.items())
    found = circle(sources)
    assert not found, " <- ".join(found)


def named_bare(source: str) -> list[str]:
    """Find texts that name a module of ours without the installed package, in places that look up
    modules by name. In a checkout such a name may work."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = []
    for call in calls:
        function = ast.unparse(call.func).rpartition(".")[2]
        named = [str(arg.value) for arg in call.args[:1] if isinstance(arg, ast.Constant)]
        if function in _BY_NAME:
            found += [name for name in named if name.partition(".")[0] in PACKAGES]
    return found


def test_what_is_looked_up_by_name_is_in_the_package() -> None:
    assert named_bare('resources.files("telemetry")') == ["telemetry"]
    assert named_bare('resources.files("millrace.telemetry")') == []
    found = {str(path): named_bare(path.read_text()) for path in python_files(*PACKAGES)}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_room_says_what_it_is() -> None:
    rooms = [path for path in python_files(*PACKAGES) if path.name == "__init__.py"]
    silent = [str(r) for r in rooms if ast.get_docstring(ast.parse(r.read_text())) is None]
    assert not silent
