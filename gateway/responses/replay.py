"""Events of an ended answer, made from its stored response.

Neither the model nor the tokens of the answer are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from millrace.gateway.responses.built_in_calls import asked_of, called
from millrace.gateway.responses.items import LENGTH, OutputItems
from millrace.gateway.responses.tools import CallKind, told_name
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    ReasoningPart,
    StepPart,
)
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.call_items import (
    BuiltInCallItem,
    CustomToolCallItem,
)
from millrace.schemas.responses.events import (
    ArgumentsDelta,
    InputDelta,
    ReasoningDelta,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StreamError,
    TextDelta,
)
from millrace.schemas.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ResponseAnswer,
)

_decode = msgspec.json.Decoder(ResponseAnswer).decode
_Deltas = ReasoningDelta | ArgumentsDelta | InputDelta


def replayed(response: bytes, after: int) -> list[ResponseEvent]:
    """Return the events of a stored response whose sequence numbers are above ``after``."""
    return list(events_after(_events(_decode(response)), after))


def _events(response: ResponseAnswer) -> Iterator[ResponseEvent]:
    begun = replace(
        response,
        status="in_progress",
        output=(),
        usage=None,
        error=None,
        incomplete_details=None,
    )
    yield ResponseCreated(sequence_number=0, response=begun)
    yield ResponseInProgress(sequence_number=1, response=begun)
    stem = response.id.rpartition("-")[2]
    seals = any(
        isinstance(item, ReasoningItem) and item.encrypted_content is not None
        for item in response.output
    )
    items = OutputItems(stem, 2, _described, _kinds(response.output), seals=seals)
    for part in _parts(response.output):
        yield from items.add(part)
    if response.status in ("completed", "incomplete"):
        yield from items.add(_end_of(response))
        kind = ResponseIncomplete if response.status == "incomplete" else ResponseCompleted
        yield kind(sequence_number=items.number(), response=response)
        return
    if response.error is not None:
        code, message = response.error.code, response.error.message
        yield StreamError(sequence_number=items.number(), code=code, message=message)
    yield ResponseFailed(sequence_number=items.number(), response=response)


def _end_of(response: ResponseAnswer) -> ChoiceEnd:
    why, last = response.incomplete_details, response.output[-1]
    reason = LENGTH if why is not None and why.reason == "max_output_tokens" else "stop"
    is_call = isinstance(last, FunctionCallItem | CustomToolCallItem | BuiltInCallItem)
    return ChoiceEnd(0, reason, is_call_cut=is_call and last.status == "incomplete")


def _described(logprobs: Sequence[TokenLogprob]) -> tuple[LogprobInfo, ...]:
    """Return stored log-probabilities, which already have the form of an answer."""
    return cast("tuple[LogprobInfo, ...]", tuple(logprobs))


def _kinds(output: Sequence[Item]) -> dict[str, CallKind]:
    kinds: dict[str, CallKind] = {}
    for item in output:
        if isinstance(item, FunctionCallItem | CustomToolCallItem):
            namespace = item.namespace or ""
            kinds[told_name(item.name, namespace)] = CallKind(item.name, namespace)
        elif isinstance(item, BuiltInCallItem):
            kinds[called(item).name] = CallKind(called(item).name, built_in=type(item))
    return kinds


def _parts(output: Sequence[Item]) -> Iterator[Part]:
    results = {item.call_id: item for item in output if isinstance(item, FunctionCallOutputItem)}
    for number, item in enumerate(output):
        if isinstance(item, MessageItem):
            for piece in item.content:
                kept = piece.logprobs if isinstance(piece, OutputText) else None
                yield AnswerText(0, 0, 1, piece.text, cast("tuple[TokenLogprob, ...]", kept or ()))
        elif isinstance(item, ReasoningItem):
            yield ReasoningPart(0, 0, 1, "".join(piece.text for piece in item.content))
        elif isinstance(item, FunctionCallItem):
            name = told_name(item.name, item.namespace or "")
            result = results.get(item.call_id)
            if result is not None:
                yield StepPart(item.call_id, name, item.arguments, True, result.output, 0)
                continue
            yield CallStart(0, number, item.call_id, name)
            yield CallArguments(0, number, item.arguments)
        elif isinstance(item, CustomToolCallItem):
            name = told_name(item.name, item.namespace or "")
            yield CallStart(0, number, item.call_id, name, custom=True)
            yield CallArguments(0, number, item.input, custom=True)
        elif isinstance(item, BuiltInCallItem):
            yield CallStart(0, number, item.call_id, called(item).name)
            yield CallArguments(0, number, _kept_arguments(item))


def _kept_arguments(item: BuiltInCallItem) -> str:
    """Return the arguments that make the same item; none make an ``incomplete`` item."""
    if item.status != "completed":
        return ""
    return msgspec.json.encode(asked_of(item)).decode()


def events_after(events: Iterable[ResponseEvent], after: int) -> Iterator[ResponseEvent]:
    """Yield ``events`` with a ``sequence_number`` over ``after``. A delta has the number of its
    last character: a delta that begins before ``after`` loses its first characters, since the
    client may have read a stream whose text was cut otherwise.
    """
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
    """Return the log-probabilities of the tokens that end after ``text``."""
    num_bytes, length = len(text.encode()), 0
    for count, info in enumerate(logprobs):
        length += len(info.bytes)
        if length > num_bytes:
            return tuple(logprobs[count:])
    return ()
