"""Events of a streamed answer of the Responses API.

``sequence_number`` grows along a stream: by one for most events, and by the number of characters
for text, thoughts and arguments. So it depends on the text before it, not on the cuts between
events. A client that continues a stream after its last token gets the rest again, with the same
numbers.
"""

from __future__ import annotations

import msgspec

from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.items import Item, OutputText, ReasoningText, ResponseAnswer


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseCreated(_Event, frozen=True, kw_only=True, tag="response.created"):
    response: ResponseAnswer


class ResponseInProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: ResponseAnswer


class ResponseCompleted(_Event, frozen=True, kw_only=True, tag="response.completed"):
    response: ResponseAnswer


class ResponseIncomplete(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    """Early end of an answer: ``response.incomplete_details`` has the reason."""

    response: ResponseAnswer


class ResponseFailed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    response: ResponseAnswer


class OutputItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class OutputItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class _OfItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class ContentPartAdded(_OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText
    content_index: int = 0


class ContentPartDone(_OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText
    content_index: int = 0


class TextDelta(_OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[LogprobInfo, ...] = ()
    content_index: int = 0


class TextDone(_OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[LogprobInfo, ...] = ()
    content_index: int = 0


class ReasoningDelta(_OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningDone(_OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class ArgumentsDelta(
    _OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    _OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class InputDelta(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(_Event, frozen=True, kw_only=True, tag="error"):
    """Failure of the stream; ``response.failed`` follows."""

    code: str
    message: str
    param: str | None = None


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | StreamError
)
