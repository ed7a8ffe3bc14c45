"""The test files that a change can affect, each with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.runner.imports import ImportGraph, module_name, path_of
from tests.runner.rules import ALWAYS, EVERYTHING, targets
from tests.support.repository import ROOT

_ROOT_CONFTEST = "tests.conftest"  # every test runs in what it and its imports set up


@dataclass(frozen=True)
class Chosen:
    """Chosen test file with its reason. ``distance`` counts the imports between the change and the
    file."""

    reason: str
    distance: int


def files_of_tests(root: Path = ROOT) -> list[str]:
    """Return all test files of the repository, by their paths from its root."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py"))


def _conftests(test_file: str) -> list[str]:
    """Return the modules of the conftest files that pytest loads for a test file, without the
    outermost."""
    folders = test_file.split("/")[1:-1]
    return [".".join(("tests", *folders[: n + 1], "conftest")) for n in range(len(folders))]


def _as_reason(chain: tuple[str, ...], changed: dict[str, str]) -> str:
    """Format a chain of imports that begins with the path of the changed file."""
    return " -> ".join((changed[chain[0]], *chain[1:]))


class Selector:
    """Chooses test files by the graph of imports and by the table of rules."""

    def __init__(self, graph: ImportGraph, files: Iterable[str]) -> None:
        self._graph = graph
        self._files = list(files)
        self._paths = {name: path_of(name) for name in graph.modules}

    @classmethod
    def of_repository(cls, deleted: Iterable[str] = (), root: Path = ROOT) -> Selector:
        return cls(ImportGraph.of_repository(root, deleted), files_of_tests(root))

    def affected(self, paths: Collection[str], *, exact: bool = False) -> dict[str, Chosen]:
        """Return the test files that a change of these paths can affect.

        ``exact`` leaves out files that are chosen by caution only: the rules that select
        everything, and tests that are always chosen.
        """
        chosen: dict[str, Chosen] = {}
        changed: dict[str, str] = {}  # module: the path that it stands for
        for path in paths:
            name = module_name(path)
            if name is not None:
                changed.setdefault(name, path)
            found = targets(path)
            if found is None:  # a file of a kind that the table does not have
                found = () if name is not None else (EVERYTHING,)
            for target in found:
                if target != EVERYTHING:
                    changed = dict.fromkeys(self._matching(target), path) | changed
                elif not exact:
                    self._choose(chosen, "*", Chosen(f"{path} selects everything", 0))
        self._follow_imports(chosen, changed, exact=exact)
        if paths and not exact:
            for pattern in ALWAYS:
                self._choose(chosen, pattern, Chosen("reads the repository's files", 0))
        return dict(sorted(chosen.items()))

    def _matching(self, target: str) -> list[str]:
        """Return the modules of the Python files that a glob matches."""
        return [name for name, path in self._paths.items() if fnmatchcase(path, target)]

    def _choose(self, chosen: dict[str, Chosen], pattern: str, why: Chosen) -> None:
        for file in self._files:
            if fnmatchcase(file, pattern):
                chosen.setdefault(file, why)

    def _follow_imports(
        self, chosen: dict[str, Chosen], changed: dict[str, str], *, exact: bool
    ) -> None:
        chains = self._graph.affected(changed)
        if _ROOT_CONFTEST in chains and not exact:
            chain = chains[_ROOT_CONFTEST]
            self._choose(chosen, "*", Chosen(_as_reason(chain, changed), len(chain) - 1))
        for file in self._files:
            name = module_name(file)
            assert name is not None
            reached = [chains[m] for m in (name, *_conftests(file)) if m in chains]
            if reached and file not in chosen:
                chain = min(reached, key=len)
                chosen[file] = Chosen(_as_reason(chain, changed), len(chain) - 1)
