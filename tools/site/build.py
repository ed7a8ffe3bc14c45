"""Strict build of the site by Zensical, in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.site.staging import stage


def build(root: Path, folder: Path) -> int:
    """Build the site of the repository ``root`` into ``folder``/site.

    Args:
        root: The repository, with ``zensical.toml``.
        folder: Receives ``source`` (copied pages) and ``site`` (HTML). Both are replaced.

    Returns:
        The exit code of Zensical: 0 if each link leads to a page and each anchor to a heading.
    """
    for name in ("source", "site"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    stage(root, folder / "source")
    shutil.copyfile(root / "zensical.toml", folder / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, check=False)  # noqa: S603 (an installed module)
    return done.returncode
