"""The graph of imports of the whole repository, read from the source text.

An edge runs from a module to each module that it may load: by an import anywhere in the file, by
the packages around an imported module, and by a module name in a string (``python -m NAME``,
``import_module``, entry points). A package that a string names counts whole, with all its modules.
Imports for type checkers only are left out: they never run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.support.repository import PACKAGES, ROOT, python_files

_FOLDERS = ("millrace", *PACKAGES, "benchmarks", "tools", "tests")
_NAMED = re.compile(r"\b(?:millrace|benchmarks|tests)\.[\w.]+")
_TOPIC = re.compile(r"\.v\d+$")  # the names of Kafka topics look like modules
_COMPUTED = re.compile(r"((?:millrace|benchmarks|tests)(?:\.\w+)*)\.")
_COMMAND = "millrace"  # ``python -m millrace``, and the installed script of the same name


def module_name(path: str) -> str | None:
    """Return the module of a Python file of the repository by its path from the root, or None."""
    if not path.endswith(".py") or path.split("/", 1)[0] not in _FOLDERS:
        return None
    parts = path.removesuffix(".py").split("/")
    if parts[0] in PACKAGES:
        parts.insert(0, "millrace")
    return ".".join(parts).removesuffix(".__init__")


def path_of(module: str) -> str:
    """Return the path at which the module would be if it were a file, not a package."""
    return module.removeprefix("millrace.").replace(".", "/") + ".py"


@dataclass
class Source:
    """Imports and module names of one file: the modules that it may load."""

    imports: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


def _last_name(node: ast.expr) -> str:
    """Return the name, or the last part of a dotted name; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _Reader(ast.NodeVisitor):
    """Collector of the imports and module names of one file."""

    def __init__(self, module: str, *, is_package: bool) -> None:
        self.source = Source()
        self._package = module if is_package else module.rpartition(".")[0]
        self._computes_names = False

    def visit_Import(self, node: ast.Import) -> None:
        self.source.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self._package.split(".")
            kept = above[: len(above) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        self.source.imports |= {base, *(f"{base}.{alias.name}" for alias in node.names)}

    def visit_If(self, node: ast.If) -> None:
        if _last_name(node.test) == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring names modules in prose
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            names = _NAMED.findall(node.value)
            self.source.named |= {name for name in names if not _TOPIC.search(name)}

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Take the package at the beginning of a name whose end is computed."""
        beginning = node.values[0] if node.values else None
        if isinstance(beginning, ast.Constant) and len(node.values) > 1:
            package = _COMPUTED.fullmatch(str(beginning.value))
            self.source.named |= {package[1]} if package else set()
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _last_name(node.func) == "import_module" and not isinstance(node.args[0], ast.Constant):
            self._computes_names = True
        self._find_command(node.args)
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        self._find_command(node.elts)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._find_command(node.elts)
        self.generic_visit(node)

    def _find_command(self, words: list[ast.expr]) -> None:
        """Find ``-m millrace``, or the script ``millrace`` followed by its arguments."""
        for word, following in pairwise(words):
            is_command = isinstance(word, ast.Constant) and word.value in {"-m", "bin"}
            if is_command and isinstance(following, ast.Constant) and following.value == _COMMAND:
                self.source.named.add(f"{_COMMAND}.__main__")

    def read(self, text: str) -> Source:
        """Return the file's edges by name. A file that computes the names of loaded modules gets
        each package that it imports as a whole."""
        self.visit(ast.parse(text))
        if self._computes_names:
            self.source.named |= self.source.imports
        return self.source


def source_of(module: str, text: str, *, is_package: bool = False) -> Source:
    """Read the modules that a module of this name and text may load. Raise SyntaxError if it is
    invalid."""
    return _Reader(module, is_package=is_package).read(text)


class ImportGraph:
    """Modules of the repository and what each of them may load."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.modules = frozenset(sources)
        self._packages = {name.rpartition(".")[0] for name in sources}
        self._inside: dict[str, set[str]] = defaultdict(set)
        for name in sources:
            for package in _packages_of(name):
                self._inside[package].add(name)
        self._loaded_by: dict[str, set[str]] = defaultdict(set)
        for name, source in sources.items():
            for target in self._targets(name, source):
                if target != name:
                    self._loaded_by[target].add(name)

    @classmethod
    def of_repository(cls, root: Path = ROOT, deleted: Iterable[str] = ()) -> ImportGraph:
        """Build the graph of the files under ``root``. ``deleted`` are paths of files that are
        gone: their importers still count."""
        sources: dict[str, Source] = {}
        for path in python_files(*_FOLDERS, root=root):
            relative = path.relative_to(root).as_posix()
            name = module_name(relative)
            if name is not None:
                is_package = path.name == "__init__.py"
                sources[name] = source_of(name, path.read_text(), is_package=is_package)
        for path_of_deleted in deleted:
            name = module_name(path_of_deleted)
            if name is not None:
                sources.setdefault(name, Source())
        return cls(sources)

    def _targets(self, name: str, source: Source) -> Iterator[str]:
        yield from _packages_of(name)
        for imported in source.imports & self.modules:
            yield imported
            yield from _packages_of(imported)
        for named in source.named:
            found = self._known(named.rstrip("."))
            if found is None:
                continue
            yield found
            yield from _packages_of(found)
            yield from self._inside.get(found, ())

    def _known(self, name: str) -> str | None:
        """Return the longest beginning of a dotted name that is a module or a package. A top-level
        package must be the whole name."""
        while name not in self.modules and name not in self._inside:
            name = name.rpartition(".")[0]
            if "." not in name:
                return None
        return name

    def affected(self, changed: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return every module that may load a changed one, with its shortest chain of imports: from
        the changed module to itself."""
        chains: dict[str, tuple[str, ...]] = {name: (name,) for name in changed}
        waiting = deque(chains)
        while waiting:
            name = waiting.popleft()
            for importer in sorted(self._loaded_by.get(name, ())):
                if importer not in chains:
                    chains[importer] = (*chains[name], importer)
                    waiting.append(importer)
        return chains


def _packages_of(name: str) -> Iterator[str]:
    """Return the packages around a module, the innermost first."""
    while name.count("."):
        name = name.rpartition(".")[0]
        yield name
