"""Print the docstrings and lines that are hard to read, and how many there are.

    python -m tests.docs.plain_english [PATH ...] [--list]

A docstring is counted if its first word is a question word, a preposition, a conjunction or a
pronoun: a function's begins with a verb, a class's with its noun. A line is counted if it names
its subject by a paraphrase such as "those that" in place of a noun.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.repository import ROOT

_OPENINGS = """what who whose whom which whether where when how why if as
of to by for from in into on onto at with without within behind before after above below
between among under over beside beyond until till since during through against per than
and or but because while though although
it its they them their he she his her this that these those one ones each either neither both
some such none nobody nothing anybody anything everybody everything whatever whoever
whichever wherever"""
OPENINGS = frozenset(_OPENINGS.split())
PARAPHRASES = re.compile(
    r"\b(those (that|who|which|whose)|(the )?ones? (that|who|which|whose)|who(m|so)?ever"
    r"|whatever|nobody|no one|that of those|what is (left|there|not|known|asked|said)"
    r"|he who|who needs|what (was|is|were|are) (first|last|over|left))\b",
    re.IGNORECASE,
)
_TEXTS = (".py", ".md", ".html", ".js", ".toml", ".yaml", ".yml", ".json", ".sql")
# Texts that are not ours to word, or that are generated from texts that are counted.
_SKIPPED = (
    "tests/",
    "gateway/web/vendor/",
    "benchmarks/results/",
    "docs/asyncapi.json",
    "docs/openapi.json",
    "docs/bench-report.schema.json",
    "gateway/web/ops/tables.json",
    "registry/demo/",
    "tools/demo/",
)


class Finding(NamedTuple):
    """A place in a file, and the text there."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def files(paths: list[str]) -> list[str]:
    """List tracked files whose wording is counted, below ``paths`` or everywhere."""
    listed = subprocess.run(
        ["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        name
        for name in listed.stdout.splitlines()
        if name.endswith(_TEXTS) and not name.startswith(_SKIPPED) and (ROOT / name).is_file()
    ]


def docstrings(name: str) -> Iterator[Finding]:
    """Yield each docstring of a Python file: its place and its first line."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Finding(name, node.body[0].lineno, text.splitlines()[0])


def hard_openings(name: str) -> tuple[list[Finding], int]:
    """Find docstrings of a Python file with a hard opening; also return how many it has in all."""
    found = list(docstrings(name))
    return [one for one in found if is_hard_opening(one.text)], len(found)


def is_hard_opening(text: str) -> bool:
    """Return whether a docstring's first word is neither a verb nor a noun."""
    return _first_word(text) in OPENINGS


def paraphrases(name: str) -> list[Finding]:
    """Find lines that name a subject by a paraphrase."""
    lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
    return [
        Finding(name, number, line.strip())
        for number, line in enumerate(lines, 1)
        if PARAPHRASES.search(line)
    ]


def _first_word(text: str) -> str:
    found = re.match(r"[A-Za-z]+", text)
    return found[0].lower() if found else ""


class Counted(NamedTuple):
    """Findings of some files, and the number of their docstrings."""

    openings: list[Finding]
    num_docstrings: int
    paraphrases: list[Finding]


def count(paths: list[str]) -> Counted:
    """Check the tracked files below ``paths``, or all files if it is empty."""
    openings: list[Finding] = []
    lines: list[Finding] = []
    num_docstrings = 0
    for name in files(paths):
        if Path(name).suffix == ".py":
            found, number = hard_openings(name)
            openings += found
            num_docstrings += number
        lines += paraphrases(name)
    return Counted(openings, num_docstrings, lines)


def main() -> None:
    """Print the counts, and with ``--list`` each finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.plain_english")
    parser.add_argument("paths", nargs="*", help="files or folders; all by default")
    parser.add_argument("--list", action="store_true", help="print each finding")
    arguments = parser.parse_args()
    openings, num_docstrings, lines = count(arguments.paths)
    if arguments.list:
        sys.stdout.writelines(f"{one}\n" for one in (*openings, *lines))
    share = 100 * len(openings) / max(1, num_docstrings)
    sys.stdout.write(
        f"docstrings with a hard opening: {len(openings)} of {num_docstrings} ({share:.1f} %)\n"
        f"lines with a paraphrase for a subject: {len(lines)}\n"
    )


if __name__ == "__main__":
    main()
