"""Token counts of jobs, under way and together."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.gateway.streams.stream import OpenStream
from millrace.schemas.frames import Usage

_COUNTS = [name for name in Usage.__struct_fields__ if name.endswith("_tokens")]


def usage_so_far(stream: OpenStream) -> Usage | None:
    """The known usage of a stream's job; None: none is known. A prompt that another
    choice pays for counts no tokens."""
    reader = stream.reader
    if reader.usage is not None:
        return reader.usage
    if reader.started is None:
        return None
    is_paid = not stream.job.shares_prompt
    return Usage(
        prompt_tokens=reader.started.num_prompt_tokens * is_paid,
        cached_tokens=reader.started.num_cached_tokens * is_paid,
        completion_tokens=reader.next_index,
    )


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """The sum of each count; None counts nothing."""
    total = dict.fromkeys(_COUNTS, 0)
    for usage in filter(None, usages):
        for name in _COUNTS:
            total[name] += getattr(usage, name)
    return Usage(**total)
