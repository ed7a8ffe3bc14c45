"""Times as people write them on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})")
_UNZONED = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?")
_MINUTE_S = 60


def parse_minute(text: str) -> int:
    """Unix time of a date's first moment in UTC, or of an RFC 3339 time on a full minute. Raises
    ValueError, which says what to write."""
    if _DAY.fullmatch(text):
        moment = _read(text).replace(tzinfo=UTC)
    elif _TIME.fullmatch(text):
        moment = _read(text.upper())
    elif _UNZONED.fullmatch(text):
        raise ValueError(f"{text!r} does not say its time zone: end it with Z for UTC")
    else:
        raise ValueError(
            f"{text!r} is neither a date like 2026-11-01 nor a time like 2026-11-01T08:30:00Z"
        )
    at_s = moment.timestamp()
    if at_s <= 0:
        raise ValueError(f"{text!r} is before 1970")
    if at_s % _MINUTE_S:
        raise ValueError(f"{text!r} is not on a full minute, and figures are kept by the minute")
    return int(at_s)


def shown(at_s: int) -> str:
    """A Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _read(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"there is no {text}: {error}") from None
