"""The files of the repository, for tests that read all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "workers", "telemetry")
PACKAGES = ("schemas", "runtime", "bus", "registry", *SERVICES, "bench", "simulation", "cli")
_CODE = (*PACKAGES, "benchmarks", "tests")
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
