"""The blocks of content that an answer of the Messages API is made of, as its parts come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    ReasoningPart,
)
from millrace.schemas.anthropic.answers import (
    AnswerBlock,
    BlockTextDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    SignatureDelta,
    Text,
    ThinkingDelta,
    ThinkingText,
    ToolUse,
)

BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
_INVALID_JSON = "INVALID_JSON"
_DECODER: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class ContentBlocks:
    """Blocks follow one another: one is open at most. Thoughts get ``signature`` and are left out
    unless ``tells_thoughts``. Events tell of a call that was cut, since they were sent before its
    end; ``blocks`` leaves it out, because clients run each call that has an ``input``."""

    def __init__(self, signature: str, *, tells_thoughts: bool) -> None:
        self.end: ChoiceEnd | None = None
        self._signature = signature
        self._tells_thoughts = tells_thoughts
        self._done: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._pieces: list[str] = []

    def add(self, part: Part) -> Iterator[BlockEvent]:
        """What is to be told of one more part."""
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
        """Begin a block of text, unless one is open."""
        if not isinstance(self._open, Text):
            yield from self._start(Text(text=""))

    def blocks(self) -> tuple[AnswerBlock, ...]:
        """All that are over."""
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
