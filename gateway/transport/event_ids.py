"""Ids of server-sent events: what a client has of a stream, as ``Last-Event-ID`` says it.

``<request id>/<index>``: the index of the first token that the client lacks, one for each choice
with commas between them; it has all that is told of the tokens before.
``<request id>/<index>~<told>``: of each choice it has what ``told`` counts: characters of deltas,
and other events.
``<request id>/<index>~<told>~<others>``: it has so many of the events that are of no choice, those
before the choices' and those behind them.
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
    """Of the event after which a client has so much."""
    others = "" if num_others is None else f"~{num_others}"
    return f"{request_id}/{_joined(indices)}~{_joined(told)}{others}"


def parse_event_id(text: str) -> EventId:
    """Raises ParameterError."""
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
        "last-event-id", "Last-Event-ID must be the id of an event of a stream from here."
    )


def _joined(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
