"""The files of the repository, for tests that read all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "workers", "telemetry")
PACKAGES = (
    *("schemas", "runtime", "bus", "registry", "engine"),
    *SERVICES,
    *("bench", "simulation", "cli"),
)
_CODE = (*PACKAGES, "benchmarks", "tools", "tests")
_TEXTS = frozenset({".py", ".md", ".js", ".css", ".html", ".sql", ".lua", ".cpp", ".h"})
_SETTINGS = frozenset({".toml", ".yaml", ".yml", ".conf", ".txt"})


def python_files(*folders: str, root: Path = ROOT) -> Iterator[Path]:
    """Every Python file below these folders of the repository."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def text_files() -> Iterator[Path]:
    """Every file of code, settings and prose that is written by hand."""
    kinds = _TEXTS | _SETTINGS
    yield from (path for path in sorted(ROOT.iterdir()) if path.suffix in kinds)
    for folder in (*_CODE, "docs", "deploy"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds)


def example_of(page: str, heading: str, language: str) -> str:
    """The first block of ``language`` below a heading of a page in docs."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, found, below = text.partition(f"\n## {heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    block = re.search(rf"^```{language}\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    assert block is not None, f"{page} has no {language} below {heading!r}"
    return block[1]
