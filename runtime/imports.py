"""Imports of third-party packages without their optional dependencies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide the modules ``names`` from imports within the context, as if they were not installed.

    Loaded modules stay. A package with an optional dependency is so imported without it.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
