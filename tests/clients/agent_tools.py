"""Four tools in plain Python, which a framework makes its own tools of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The file.
    """
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: The file.
        text: What it contains then.
    """
    Path(path).write_text(text)
    return "written"


def replace(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: The file.
        old: The text that is there.
        new: The text in its place.
    """
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "replaced"


def shell(command: str) -> str:
    """Run a command.

    Args:
        command: The line for sh.
    """
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
