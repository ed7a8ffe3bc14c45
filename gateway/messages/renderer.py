"""Bytes of one answer of the Messages API: its events, or the whole message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from millrace.gateway.errors import Refusal
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    PartEvents,
    ReasoningPart,
)
from millrace.gateway.tenancy.identity import AuthenticationError
from millrace.schemas.anthropic.answers import (
    AnswerBlock,
    BlockTextDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    MessageAnswer,
    MessageEnd,
    MessageEnding,
    MessageEvent,
    MessagesError,
    MessagesErrorInfo,
    MessageStart,
    MessageStop,
    MessagesUsage,
    SignatureDelta,
    StopReason,
    Text,
    ThinkingDelta,
    ThinkingText,
    ThinkingTokensDetails,
    ToolUse,
)
from millrace.schemas.context_length import in_anthropic_words
from millrace.schemas.errors import ContextLengthError
from millrace.schemas.frames import FinishReason, Usage
from millrace.schemas.notices import field_of

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_encode = msgspec.json.encode
_NOTHING = Usage()
_WITH_DELTA = (AnswerText, ReasoningPart, CallArguments)
BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
_INVALID_JSON = "INVALID_JSON"
_DECODER: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class MessagesRefusal(Refusal, frozen=True, kw_only=True):
    """Refusal with a body in Anthropic's shape."""

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(error_of(self))


def error_of(refusal: Refusal) -> MessagesError:
    """Return the error object of a refusal, for a body or an event."""
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    info = MessagesErrorInfo(
        type=_TYPES.get(refusal.status, kind),
        message=_message(refusal),
        code=refusal.code,
        param=refusal.param,
    )
    return MessagesError(error=info)


def _message(refusal: Refusal) -> str:
    """Return the message, in Anthropic's words where clients search for them."""
    if refusal.code == AuthenticationError.code:
        return f"invalid x-api-key: {refusal.message}"
    if refusal.code == ContextLengthError.code:
        return in_anthropic_words(refusal.message)
    return refusal.message


def in_messages_shape(refusal: Refusal) -> Refusal:
    """Return the refusal in Anthropic's shape."""
    return MessagesRefusal(**msgspec.structs.asdict(refusal))


_HEADS = {
    kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode() for kind in get_args(MessageEvent)
}
_PLAIN = (
    _HEADS[ContentBlockDelta]
    + b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":',
    b"}}\n\n",
)


class MessageRenderer:
    """Renderer of Messages answers. The only block of a text-only answer begins with the message,
    so that it exists even for an empty answer.
    """

    def __init__(self, response: ResponseReader) -> None:
        self._response = response
        self._choice = response.choices[0]
        self._blocks = ContentBlocks(
            response.request_id, tells_thoughts=response.request.include_reasoning
        )
        self._opening = list(self._blocks.open_text()) if self._choice.is_plain else []
        self.plain = _PLAIN if self._choice.is_plain else None

    def first(self) -> bytes:
        usage = _usage(self._choice.usage_so_far or _NOTHING)
        message = msgspec.structs.replace(self._message(usage), content=())
        return _bytes_of([MessageStart(message=message), *self._opening])

    def part(self, part: Part) -> PartEvents:
        events = list(self._blocks.add(part))
        if isinstance(part, _WITH_DELTA) and events:
            return PartEvents(_bytes_of(events[:-1]), _bytes_of(events[-1:]))
        return PartEvents(_bytes_of(events))

    def last(self) -> bytes:
        message = self._ended()
        assert message.stop_reason is not None
        end = MessageEnd(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        return _bytes_of(
            [MessageEnding(delta=end, usage=message.usage), MessageStop(notices=message.notices)]
        )

    def failed(self, refusal: Refusal) -> bytes:
        return _bytes_of([error_of(refusal)])

    def add(self, part: Part) -> None:
        for _event in self._blocks.add(part):
            pass

    def whole(self) -> bytes:
        return _encode(self._ended())

    @property
    def must_store(self) -> bool:
        return False

    async def store(self) -> None:
        """Store nothing: messages are not kept."""

    def _ended(self) -> MessageAnswer:
        reason, stop_sequence = self._stop_reason()
        return msgspec.structs.replace(
            self._message(_usage(self._response.usage)),
            stop_reason=reason,
            stop_sequence=stop_sequence,
            notices=field_of(self._response.notices),
        )

    def _message(self, usage: MessagesUsage) -> MessageAnswer:
        return MessageAnswer(
            id=self._response.request_id,
            model=self._response.request.model,
            content=self._blocks.blocks(),
            usage=usage,
        )

    def _stop_reason(self) -> tuple[StopReason, str | None]:
        end = self._blocks.end
        assert end is not None
        if end.reason == FinishReason.LENGTH.value:
            return "max_tokens", None
        if end.reason != FinishReason.STOP.value:
            return "tool_use", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "end_turn", None


def _bytes_of(events: Iterable[MessageEvent]) -> bytes:
    return b"".join([_HEADS[type(event)] + _encode(event) + b"\n\n" for event in events])


def _usage(usage: Usage) -> MessagesUsage:
    details = ThinkingTokensDetails(thinking_tokens=usage.reasoning_tokens)
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=details if usage.reasoning_tokens else msgspec.UNSET,
    )


class ContentBlocks:
    """Content blocks of an answer, of which at most one is open. Thoughts get ``signature`` and are
    left out unless ``tells_thoughts``. Events include a call that was cut, since they were sent
    before its end; ``blocks`` leaves it out, because clients run each call that has an ``input``.
    """

    def __init__(self, signature: str, *, tells_thoughts: bool) -> None:
        self.end: ChoiceEnd | None = None
        self._signature = signature
        self._tells_thoughts = tells_thoughts
        self._done: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._pieces: list[str] = []

    def add(self, part: Part) -> Iterator[BlockEvent]:
        """Yield the events of one more part."""
        if isinstance(part, AnswerText):
            if part.text:
                yield from self.open_text()
                yield self._more(part.text, BlockTextDelta(text=part.text))
        elif isinstance(part, ReasoningPart):
            if part.text and self._tells_thoughts:
                if not isinstance(self._open, ThinkingText):
                    yield from self._start(ThinkingText(thinking="", signature=""))
                yield self._more(part.text, ThinkingDelta(thinking=part.text))
        elif isinstance(part, CallStart):
            yield from self._start(ToolUse(id=part.call_id, name=part.name, input={}))
        elif isinstance(part, CallArguments):
            if part.text:
                yield self._more(part.text, InputJsonDelta(partial_json=part.text))
        elif isinstance(part, ChoiceEnd):
            yield from self._stop()
            self.end = part
            if part.is_call_cut:
                self._done.pop()

    def open_text(self) -> Iterator[BlockEvent]:
        """Begin a block of text, unless a text block is open."""
        if not isinstance(self._open, Text):
            yield from self._start(Text(text=""))

    def blocks(self) -> tuple[AnswerBlock, ...]:
        """Return all finished blocks."""
        return tuple(self._done)

    def _start(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        yield from self._stop()
        self._open = block
        yield ContentBlockStart(index=len(self._done), content_block=block)

    def _more(self, piece: str, delta: Delta) -> ContentBlockDelta:
        self._pieces.append(piece)
        return ContentBlockDelta(index=len(self._done), delta=delta)

    def _stop(self) -> Iterator[BlockEvent]:
        block = self._open
        if block is None:
            return
        index = len(self._done)
        if isinstance(block, ThinkingText):
            delta = SignatureDelta(signature=self._signature)
            yield ContentBlockDelta(index=index, delta=delta)
        self._done.append(self._whole(block, "".join(self._pieces)))
        self._open = None
        self._pieces.clear()
        yield ContentBlockStop(index=index)

    def _whole(self, block: AnswerBlock, text: str) -> AnswerBlock:
        if isinstance(block, Text):
            return Text(text=text)
        if isinstance(block, ThinkingText):
            return ThinkingText(thinking=text, signature=self._signature)
        return msgspec.structs.replace(block, input=_input(text))


def _input(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {_INVALID_JSON: text}
