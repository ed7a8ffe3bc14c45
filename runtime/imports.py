"""Imports packages of others without what they load merely because it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within it the modules ``names`` cannot be imported, as if they were not installed; those that
    are loaded already stay. A package that can do without one is so loaded without it."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
