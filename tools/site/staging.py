"""Copies of all pages, and of the files that they link to, in the layout of the repository.

Pages link to each other, to pictures and to files of the code by relative paths, which work on a
code host. The generator reads one folder, so the pages and their targets are copied to it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_LINK = re.compile(r"(\]\()(?!https?:|mailto:)([^)#\s]+)((?:#[^)]*)?\))")


def pages(root: Path) -> list[Path]:
    """List the pages of the site, relative to ``root``."""
    names = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
    return [Path(name) for name in names] + sorted(
        path.relative_to(root) for path in (root / "docs").rglob("*.md")
    )


def stage(root: Path, folder: Path) -> None:
    """Copy the pages of ``root`` and the targets of their links into an empty ``folder``.

    A linked folder becomes a page that lists its files. The link leads to that page.
    """
    for page in pages(root):
        text = _link_listings((root / page).read_text(encoding="utf-8"), root, page)
        _write(folder / page, text)
        for _, target, _ in _LINK.findall(text):
            _copy_target(root, folder, page.parent / target)


def _link_listings(text: str, root: Path, page: Path) -> str:
    def listed(link: re.Match[str]) -> str:
        start, target, end = link.groups()
        if (root / page.parent / target).is_dir():
            target = f"{target.rstrip('/')}/README.md"
        return f"{start}{target}{end}"

    return _LINK.sub(listed, text)


def _copy_target(root: Path, folder: Path, target: Path) -> None:
    source = (root / target).resolve()
    if not source.is_relative_to(root.resolve()):
        return
    copy = folder / source.relative_to(root.resolve())
    if source.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md" and not copy.exists():
            _write(copy, source.read_text(encoding="utf-8"))
        elif source.suffix != ".md":
            shutil.copyfile(source, copy)
    elif source.name == "README.md" and source.parent.is_dir() and not copy.exists():
        names = sorted(path.name for path in source.parent.iterdir() if path.name[0] not in "._")
        listing = "\n".join(f"- `{name}`" for name in names)
        _write(copy, f"# `{source.parent.relative_to(root.resolve())}/`\n\n{listing}\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
