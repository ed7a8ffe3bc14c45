"""Event ids of a stream, and the events that its client lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.parts import AnswerText, CallArguments, Part, ReasoningPart
from millrace.schemas.errors import ParameterError

_END = b"\n\n"
_OF_TOKENS = (AnswerText, ReasoningPart)
_WITH_TEXT = (AnswerText, ReasoningPart, CallArguments)
_LIST = r"[0-9]{1,9}(?:,[0-9]{1,9}){0,1023}"
EVENT_ID_PATTERN = rf"([A-Za-z0-9_.-]{{1,128}})/({_LIST})(?:~({_LIST})(?:~([0-9]{{1,9}}))?)?"
_FORM = re.compile(EVENT_ID_PATTERN)


class EventId(NamedTuple):
    """Position in a stream. ``told`` and ``num_others`` are None in an id without them."""

    request_id: str
    indices: tuple[int, ...]
    told: tuple[int, ...] | None = None
    num_others: int | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether the client has any event of the stream."""
        return any(self.indices) or any(self.told or ()) or bool(self.num_others)


def event_id(
    request_id: str, indices: Sequence[int], told: Sequence[int], num_others: int | None = None
) -> str:
    """Format the id of the event after which a client has this much."""
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


class ToldEvents:
    """Counter of a stream's events, including the events that an earlier connection sent. ``had``
    is the number of events that the client has.
    """

    def __init__(self, response: ResponseStream, renderer: Renderer, had: EventId | None) -> None:
        num_choices = len(response.choices)
        self.is_resumed = had is not None and had.has_begun
        self._response = response
        self._render = renderer.part
        self._indices = [0] * num_choices if had is None else list(had.indices)
        self._told = [0] * num_choices
        self._num_caught_up = [0] * num_choices
        # None: the client has all events of the tokens before the index.
        self._had: list[int | None] = [0] * num_choices
        if had is not None and had.has_begun:
            self._had = [None] * num_choices if had.told is None else [*had.told]
        self._num_others = 0
        self._num_others_had = 0 if had is None else had.num_others
        self._has_all_first = self.is_resumed and self._num_others_had is None

    def first(self, events: bytes) -> bytes:
        """Return the events before the first part that the client lacks."""
        return b"".join(self._others(events, has_all=self._has_all_first))

    def last(self, events: bytes) -> bytes:
        """Return the events after the last part that the client lacks."""
        return b"".join(self._others(events, has_all=False))

    def parts(self, parts: list[Part]) -> bytes:
        """Return the events of these parts that the client lacks."""
        events: list[bytes] = []
        for part in parts:
            if self.is_resumed:
                self._catch_up(part.choice, events)
                for piece in self._pieces(part):
                    self._tell(piece, events, is_had=False)
            else:
                self._tell(part, events, is_had=False)
        return b"".join(events)

    def catch_up(self) -> bytes:
        """Return the events of the parts of an earlier connection that the client lacks."""
        events: list[bytes] = []
        for choice in range(len(self._told)):
            self._catch_up(choice, events)
        return b"".join(events)

    def note_plain(self, num_characters: int, next_index: int) -> None:
        """Count text of the only choice that was sent without ``parts``."""
        self._told[0] += num_characters
        self._indices[0] = next_index

    def _catch_up(self, choice: int, events: list[bytes]) -> None:
        had = self._response.choices[choice].had
        while self._num_caught_up[choice] < len(had):
            part = had[self._num_caught_up[choice]]
            self._num_caught_up[choice] += 1
            for piece in self._pieces(part):
                self._tell(piece, events, is_had=True)

    def _tell(self, part: Part, events: list[bytes], *, is_had: bool) -> None:
        choice = part.choice
        others, delta = self._render(part)
        for event in _split(others) if others else ():
            self._told[choice] += 1
            if not self._has(choice, is_had=is_had):
                events.append(self._with_id(event))
        text = _text_of(part)
        self._told[choice] += len(text)
        if isinstance(part, _OF_TOKENS) and not is_had:
            self._indices[choice] = part.first_index + part.num_tokens
        if delta and not self._has(choice, is_had=is_had, is_empty=not text):
            events.append(self._with_id(delta))

    def _pieces(self, part: Part) -> Iterator[Part]:
        """Split the part after the text that the client has. The text's first character is a piece
        of its own: rendering it shows how many events precede the text.
        """
        text, choice = _text_of(part), part.choice
        had = self._had[choice] or 0
        if len(text) < 2 or had <= self._told[choice]:
            yield part
            return
        yield _with_text(part, text[0])
        rest, num_had = text[1:], had - self._told[choice]
        if 0 < num_had < len(rest):
            yield _with_text(part, rest[:num_had])
            rest = rest[num_had:]
        yield _with_text(part, rest, is_last=True)

    def _has(self, choice: int, *, is_had: bool, is_empty: bool = False) -> bool:
        """Return whether the client has the event that was counted last. A delta without text
        belongs to its tokens, which are not sent again.
        """
        had = self._had[choice]
        if had is None or (is_empty and is_had):
            return is_had
        return self._told[choice] < had if is_empty else self._told[choice] <= had

    def _others(self, events: bytes, *, has_all: bool) -> Iterator[bytes]:
        for event in _split(events):
            self._num_others += 1
            if not has_all and self._num_others > (self._num_others_had or 0):
                yield self._with_id(event, self._num_others)

    def _with_id(self, event: bytes, num_others: int | None = None) -> bytes:
        line = event_id(self._response.request_id, self._indices, self._told, num_others)
        return b"id: %b\n%b" % (line.encode(), event)


def _text_of(part: Part) -> str:
    return part.text if isinstance(part, _WITH_TEXT) else ""


def _with_text(part: Part, text: str, *, is_last: bool = False) -> Part:
    """Return a piece of the part's text. The last piece has the part's token data."""
    if isinstance(part, CallArguments):
        return part._replace(text=text)
    assert isinstance(part, _OF_TOKENS)
    if is_last:
        return part._replace(text=text)
    return part._replace(text=text, num_tokens=0, logprobs=())


def _split(events: bytes) -> list[bytes]:
    return [event + _END for event in events.split(_END)[:-1]]
