"""Paths on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def as_path(text: str) -> Path:
    """The type of an argument that is a path. Raises argparse.ArgumentTypeError."""
    return Path(path_or_name(text))


def path_or_name(text: str) -> str:
    """The type of an argument that is a path or a name: any text but an empty one, which would be
    the current folder. Raises argparse.ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError(
            "it is empty; leave the option out, or write . for the current folder"
        )
    return text


def shown_path(path: Path) -> str:
    """A path as a person would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
