"""Token counts of jobs, under way and together."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.bus.frame_reader import StreamReader
from millrace.schemas.frames import Usage

_COUNTS = [name for name in Usage.__struct_fields__ if name.endswith("_tokens")]


def usage_so_far(reader: StreamReader) -> Usage | None:
    """What was computed for a stream as far as it is known; None: nothing was."""
    if reader.usage is not None:
        return reader.usage
    if reader.started is None:
        return None
    return Usage(
        prompt_tokens=reader.started.num_prompt_tokens,
        cached_tokens=reader.started.num_cached_tokens,
        completion_tokens=reader.next_index,
    )


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """The sum of each count; None counts nothing."""
    total = dict.fromkeys(_COUNTS, 0)
    for usage in filter(None, usages):
        for name in _COUNTS:
            total[name] += getattr(usage, name)
    return Usage(**total)
