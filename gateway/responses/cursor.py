"""The events of a stream that a client lacks, which has those up to a sequence number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.events import (
    ArgumentsDelta,
    InputDelta,
    ReasoningDelta,
    ResponseEvent,
    TextDelta,
)

_Deltas = ReasoningDelta | ArgumentsDelta | InputDelta


def events_after(events: Iterable[ResponseEvent], after: int) -> Iterator[ResponseEvent]:
    """``events`` with a ``sequence_number`` over ``after``. That of a delta is its last
    character's, so one that begins before loses the characters up to there: the client may have
    read a stream whose text was cut otherwise."""
    for event in events:
        num_lacking = event.sequence_number - after
        if num_lacking <= 0:
            continue
        if isinstance(event, TextDelta) and num_lacking < len(event.delta):
            given, rest = event.delta[:-num_lacking], event.delta[-num_lacking:]
            yield replace(event, delta=rest, logprobs=_behind(given, event.logprobs))
        elif isinstance(event, _Deltas) and num_lacking < len(event.delta):
            yield replace(event, delta=event.delta[-num_lacking:])
        else:
            yield event


def _behind(text: str, logprobs: Sequence[LogprobInfo]) -> tuple[LogprobInfo, ...]:
    """Those of the tokens that end behind ``text``."""
    num_bytes, length = len(text.encode()), 0
    for count, info in enumerate(logprobs):
        length += len(info.bytes)
        if length > num_bytes:
            return tuple(logprobs[count:])
    return ()
