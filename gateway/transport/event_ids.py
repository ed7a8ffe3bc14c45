"""Ids of server-sent events. ``Last-Event-ID`` says by one how much of a stream the client has.

``<request id>/<index>``: ``index`` is the first token that the client lacks; several choices have
one index each, with commas between them. The client has all events of the tokens before.
``<request id>/<index>~<told>``: ``told`` is what the client has of each choice: the number of
characters in deltas plus the number of other events.
``<request id>/<index>~<told>~<others>``: ``others`` is the number of events that it has of the
stream as a whole, which come before and after the events of choices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from millrace.schemas.errors import ParameterError

_LIST = r"[0-9]{1,9}(?:,[0-9]{1,9}){0,1023}"
EVENT_ID_PATTERN = rf"([A-Za-z0-9_.-]{{1,128}})/({_LIST})(?:~({_LIST})(?:~([0-9]{{1,9}}))?)?"
_FORM = re.compile(EVENT_ID_PATTERN)


class EventId(NamedTuple):
    """``told`` and ``num_others`` are None in an id without them."""

    request_id: str
    indices: tuple[int, ...]
    told: tuple[int, ...] | None = None
    num_others: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has anything of the stream."""
        return any(self.indices) or any(self.told or ()) or bool(self.num_others)


def event_id(
    request_id: str, indices: Sequence[int], told: Sequence[int], num_others: int | None = None
) -> str:
    """Make the id of the event after which a client has this much."""
    others = "" if num_others is None else f"~{num_others}"
    return f"{request_id}/{_joined(indices)}~{_joined(told)}{others}"


def parse_event_id(text: str) -> EventId:
    """Read an event id. Raises ParameterError for a text that is not an event id."""
    found = _FORM.fullmatch(text)
    if found is not None:
        request_id, indices, told, others = found.groups()
        parsed = EventId(
            request_id,
            _numbers(indices),
            None if told is None else _numbers(told),
            None if others is None else int(others),
        )
        if parsed.told is None or len(parsed.told) == len(parsed.indices):
            return parsed
    raise ParameterError(
        "last-event-id", "Last-Event-ID must be the id of an event that Millrace sent."
    )


def _joined(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
