"""Numbers on a command line."""

from __future__ import annotations

import argparse

_MOST = 2**31 - 1


def whole_number(text: str) -> int:
    """Read a whole number of at most ``_MOST`` in size. Raises argparse.ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None
    if abs(value) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is above {_MOST}")
    return value


def seconds_to_wait(text: str) -> float:
    """The type of an argument that bounds a wait. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no number of seconds") from None
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be 0 seconds or more")
    return value
