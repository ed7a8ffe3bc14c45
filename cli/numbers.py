"""Numbers on a command line."""

from __future__ import annotations

import argparse

_MOST = 2**31 - 1


def whole_number(text: str) -> int:
    """The type of an argument that counts something. Raises argparse.ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no whole number") from None
    if abs(value) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is above {_MOST}")
    return value
