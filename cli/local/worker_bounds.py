"""``--autoscale MIN:MAX``: how few and how many workers a model may have."""

from __future__ import annotations

import re

from millrace.schemas.errors import ConfigError


def parse_bounds(text: str, at_most: int) -> tuple[int, int]:
    """MIN, which may be 0, and MAX, at least 1 and ``at_most``. Raises ConfigError."""
    matched = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if matched is None:
        raise ConfigError(f"--autoscale: {text!r} is not MIN:MAX, such as 1:4")
    fewest, most = int(matched[1]), int(matched[2])
    if not 1 <= most <= at_most:
        raise ConfigError(f"--autoscale: MAX must be between 1 and {at_most}, got {most}")
    if fewest > most:
        raise ConfigError(f"--autoscale: MIN is {fewest}, which is more than MAX, {most}")
    return fewest, most
