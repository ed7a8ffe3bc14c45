"""Where a client of an event stream is, as the stream's events say it and ``Last-Event-ID`` does.

``<request id>/<index>``: the index of the first token that has not come yet, one for each choice
with commas between them.
"""

from __future__ import annotations

import re

from millrace.schemas.errors import ParameterError

_FORM = re.compile(r"([A-Za-z0-9_.-]{1,128})/([0-9]{1,9}(?:,[0-9]{1,9}){0,1023})")


def event_id_line(prefix: bytes, indices: tuple[int, ...]) -> bytes:
    """``prefix`` is ``id: <request id>/``."""
    if len(indices) == 1:
        return prefix + b"%d\n" % indices[0]
    return prefix + b",".join(b"%d" % index for index in indices) + b"\n"


def with_event_id(events: bytes, line: bytes) -> bytes:
    """The events, the last of which gets the id: whoever has that one has them all."""
    start = events.rfind(b"\n\n", 0, len(events) - 2)
    if start < 0:
        return line + events
    start += 2
    return events[:start] + line + events[start:]


def parse_event_id(text: str) -> tuple[str, tuple[int, ...]]:
    """The request and the indices. Raises ParameterError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ParameterError(
            "last-event-id", "Last-Event-ID must be the id of an event of a stream from here."
        )
    return found[1], tuple(int(index) for index in found[2].split(","))
