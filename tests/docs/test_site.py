"""Documentation site: a strict build, and a navigation with every page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tools.site.build import build
from tools.site.staging import pages, stage

_SECTIONS = ["Get started", "Guides", "Concepts", "Operate", "Reference", "Contribute"]
_DECISIONS = ROOT / "docs" / "decisions"


def _navigation() -> list[dict[str, Any]]:
    read = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = read["project"]["nav"]
    return entries


def _entries(navigation: list[dict[str, Any]]) -> list[str]:
    found = []
    for entry in navigation:
        for target in entry.values():
            found.extend([target] if isinstance(target, str) else _entries(target))
    return found


def _listed_decisions() -> set[str]:
    index = (_DECISIONS / "README.md").read_text(encoding="utf-8")
    return {f"docs/decisions/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", index)}


def test_the_navigation_has_every_page_once() -> None:
    entries = _entries(_navigation())
    assert len(entries) == len(set(entries))
    decisions = {str(path.relative_to(ROOT)) for path in _DECISIONS.glob("2*.md")}
    assert _listed_decisions() == decisions
    assert {str(page) for page in pages(ROOT)} - decisions == set(entries)


def test_the_navigation_is_in_the_order_of_readers() -> None:
    names = [name for entry in _navigation() for name in entry]
    assert names == ["Home", *_SECTIONS]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    assert build(ROOT, tmp_path) == 0
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'src="docs/images/chat.png"' in home
    assert (tmp_path / "site" / "docs" / "images" / "chat.png").exists()
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(?:https?:)?//([^"]+)', page.read_text()
        )
        assert not loaded, f"{page.name} loads a file from the network"


def _small_repository(root: Path, text: str) -> Path:
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "benchmarks" / "results" / "walk.json").write_text("{}", encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md"):
        (root / name).write_text("# A page\n", encoding="utf-8")
    (root / "benchmarks" / "README.md").write_text(f"# Results\n\n{text}\n", encoding="utf-8")
    (root / "zensical.toml").write_text(
        '[project]\nsite_name = "x"\ndocs_dir = "source"\nsite_dir = "site"\n', encoding="utf-8"
    )
    return root


@pytest.mark.parametrize(
    ("link", "is_valid"),
    [
        ("../README.md#a-page", True),
        ("../lost.md", False),
        ("../README.md#lost", False),
    ],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str, is_valid: bool) -> None:
    root = _small_repository(tmp_path / "repository", f"[a link]({link})")
    assert (build(root, tmp_path / "build") == 0) is is_valid


def test_a_linked_folder_becomes_a_list_of_its_files(tmp_path: Path) -> None:
    page = "[figures](results) of [one](results/walk.json)"
    stage(_small_repository(tmp_path / "repository", page), tmp_path / "source")
    copied = tmp_path / "source" / "benchmarks"
    assert "[figures](results/README.md)" in (copied / "README.md").read_text(encoding="utf-8")
    assert "- `walk.json`" in (copied / "results" / "README.md").read_text(encoding="utf-8")
    assert (copied / "results" / "walk.json").read_text(encoding="utf-8") == "{}"
