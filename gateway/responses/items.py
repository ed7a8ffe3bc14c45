"""Output items of the Responses API, and their events, made from an answer's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.gateway.responses.built_in_calls import built_in_item
from millrace.gateway.responses.normalised import ID_PREFIXES, sealed
from millrace.gateway.responses.tools import CallKind
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
    ItemStatus,
)
from millrace.schemas.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    InputDelta,
    InputDone,
    OutputItemAdded,
    OutputItemDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from millrace.schemas.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    IncompleteReason,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Describe = Callable[[Sequence[TokenLogprob]], tuple[LogprobInfo, ...]]
LENGTH = "length"
# Prefixes of the ids of calls: of functions and of custom tools.
_PREFIX = ("fc", "ctc")


class GrowingMessage:
    """Message in progress."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.texts: list[str] = []
        self.logprobs: list[LogprobInfo] = []

    def content(self) -> OutputText:
        return OutputText("".join(self.texts), logprobs=tuple(self.logprobs))

    def item(self, status: ItemStatus) -> MessageItem:
        return MessageItem(
            id=self.item_id, role="assistant", content=(self.content(),), status=status
        )


class GrowingThoughts:
    """Reasoning in progress."""

    def __init__(self, item_id: str, *, seals: bool) -> None:
        self.item_id = item_id
        self.texts: list[str] = []
        self._seals = seals

    def content(self) -> ReasoningText:
        return ReasoningText("".join(self.texts))

    def item(self, status: ItemStatus) -> ReasoningItem:
        content, seals = self.content(), self._seals and status != "in_progress"
        return ReasoningItem(
            id=self.item_id,
            content=(content,),
            encrypted_content=sealed(content.text) if seals else None,
            status=status,
        )


class GrowingCall:
    """Call with growing arguments or input."""

    def __init__(self, item_id: str, call_id: str, kind: CallKind, *, custom: bool) -> None:
        self.item_id = item_id
        self.call_id = call_id
        self.kind = kind
        self.custom = custom
        self.texts: list[str] = []

    def item(self, status: ItemStatus) -> FunctionCallItem | CustomToolCallItem | BuiltInCallItem:
        name, text = self.kind.name, "".join(self.texts)
        namespace = self.kind.namespace or msgspec.UNSET
        if self.kind.built_in is not None:
            return built_in_item(self.kind.built_in, self.item_id, self.call_id, text, status)
        if self.custom:
            return CustomToolCallItem(
                id=self.item_id,
                call_id=self.call_id,
                name=name,
                input=text,
                namespace=namespace,
                status=status,
            )
        return FunctionCallItem(
            id=self.item_id,
            call_id=self.call_id,
            name=name,
            arguments=text,
            namespace=namespace,
            status=status,
        )


class OutputItems:
    """Output of one answer, as far as its parts were taken.

    Ids of items and sequence numbers depend on ``stem`` and on the joined content of the parts, not
    on the boundaries of parts: a stream that is read again has the same ids and numbers.
    ``incomplete`` is the reason if the answer ended before the model was done. ``kinds`` has the
    kind of each tool's calls by the tool's name for the model; calls of other tools are calls of
    functions. With ``seals``, thoughts are also in ``encrypted_content``.
    """

    def __init__(
        self,
        stem: str,
        first_number: int,
        describe: Describe,
        kinds: Mapping[str, CallKind],
        *,
        seals: bool = False,
    ) -> None:
        self.incomplete: IncompleteReason | None = None
        self._stem = stem
        self._next_number = first_number
        self._describe = describe
        self._kinds = kinds
        self._seals = seals
        self._done: list[Item] = []
        self._open: GrowingMessage | GrowingThoughts | GrowingCall | None = None
        # Of tokens without visible text yet: a part of a character, or of a call's markup.
        self._hidden: list[TokenLogprob] = []

    def number(self, advance: int = 1) -> int:
        """Return the sequence number of an event that counts as ``advance`` units."""
        self._next_number += advance
        return self._next_number - 1

    def items(self) -> tuple[Item, ...]:
        """Return all items; the last one may be cut off."""
        if self._open is None:
            return tuple(self._done)
        return (*self._done, self._open.item("incomplete"))

    def add(self, part: Part) -> list[ResponseEvent]:
        """Return the events of a part."""
        events: list[ResponseEvent] = []
        if isinstance(part, AnswerText):
            self._take_text(part, events)
        elif isinstance(part, ReasoningPart):
            self._take_thoughts(part.text, events)
        elif isinstance(part, CallStart):
            self._start_call(part.call_id, part.name, events, custom=part.custom)
        elif isinstance(part, CallArguments):
            self._take_arguments(part.text, events)
        elif isinstance(part, StepPart):
            self._take_step(part, events)
        else:
            self._end(part, events)
        return events

    def _tell(
        self,
        events: list[ResponseEvent],
        kind: Callable[..., ResponseEvent],
        advance: int = 1,
        **fields: Any,
    ) -> None:
        """Append an event about the open item, which counts as ``advance`` units."""
        number = self.number(advance)
        events.append(kind(sequence_number=number, output_index=len(self._done), **fields))

    def _take_text(self, part: AnswerText, events: list[ResponseEvent]) -> None:
        self._hidden += part.logprobs
        if not part.text:
            return
        if not isinstance(self._open, GrowingMessage):
            self._begin(GrowingMessage(self._item_id("msg", events)), events)
        message = self._open
        assert isinstance(message, GrowingMessage)
        logprobs = self._describe(self._hidden) if self._hidden else ()
        logprobs = _without_end(logprobs, part.text)
        self._hidden = []
        message.texts.append(part.text)
        message.logprobs += logprobs
        self._tell(
            events,
            TextDelta,
            len(part.text),
            item_id=message.item_id,
            delta=part.text,
            logprobs=logprobs,
        )

    def _take_thoughts(self, text: str, events: list[ResponseEvent]) -> None:
        if not text:
            return
        if not isinstance(self._open, GrowingThoughts):
            item_id = self._item_id("rs", events)
            self._begin(GrowingThoughts(item_id, seals=self._seals), events)
        thoughts = self._open
        assert thoughts is not None
        thoughts.texts.append(text)
        self._tell(events, ReasoningDelta, len(text), item_id=thoughts.item_id, delta=text)

    def _begin(
        self, growing: GrowingMessage | GrowingThoughts, events: list[ResponseEvent]
    ) -> None:
        """Open an item, and the one part of its content."""
        self._open = growing
        item = msgspec.structs.replace(growing.item("in_progress"), content=())
        self._tell(events, OutputItemAdded, item=item)
        self._tell(events, ContentPartAdded, item_id=item.id, part=growing.content())

    def _start_call(
        self, call_id: str, name: str, events: list[ResponseEvent], *, custom: bool = False
    ) -> None:
        self._hidden = []
        kind = self._kinds.get(name) or CallKind(name)
        prefix = ID_PREFIXES[kind.built_in] if kind.built_in else _PREFIX[custom]
        item_id = self._item_id(prefix, events)
        self._open = GrowingCall(item_id, call_id, kind, custom=custom)
        self._tell(events, OutputItemAdded, item=self._open.item("in_progress"))

    def _take_arguments(self, text: str, events: list[ResponseEvent]) -> None:
        call = self._open
        assert isinstance(call, GrowingCall), "arguments follow the start of their call"
        if not text:
            return
        call.texts.append(text)
        if call.kind.built_in is None:
            kind = InputDelta if call.custom else ArgumentsDelta
            self._tell(events, kind, len(text), item_id=call.item_id, delta=text)

    def _take_step(self, part: StepPart, events: list[ResponseEvent]) -> None:
        """Add a call of a gateway-run tool, and its output."""
        self._start_call(part.call_id, part.name, events)
        self._take_arguments(part.arguments, events)
        item_id = self._item_id("fco", events)
        item = FunctionCallOutputItem(id=item_id, call_id=part.call_id, output=part.output)
        self._tell(events, OutputItemAdded, item=item)
        self._finish(item, events)

    def _end(self, part: ChoiceEnd, events: list[ResponseEvent]) -> None:
        if part.reason == LENGTH:
            self.incomplete = "max_output_tokens"
        elif part.is_call_cut:
            self.incomplete = "stop"
        if not self._done and self._open is None:
            # An empty answer is a message too.
            self._begin(GrowingMessage(self._item_id("msg", events)), events)
        is_whole = self.incomplete is None or (
            isinstance(self._open, GrowingCall) and not part.is_call_cut
        )
        self._close("completed" if is_whole else "incomplete", events)

    def _close(self, status: ItemStatus, events: list[ResponseEvent]) -> None:
        growing = self._open
        if growing is None:
            return
        item = growing.item(status)
        if isinstance(growing, GrowingMessage | GrowingThoughts):
            content = growing.content()
            if isinstance(content, OutputText):
                told = content.logprobs or ()
                self._tell(events, TextDone, item_id=item.id, text=content.text, logprobs=told)
            else:
                self._tell(events, ReasoningDone, item_id=item.id, text=content.text)
            self._tell(events, ContentPartDone, item_id=item.id, part=content)
        elif item.status == "completed" and isinstance(item, FunctionCallItem):
            arguments = item.arguments
            self._tell(events, ArgumentsDone, item_id=item.id, name=item.name, arguments=arguments)
        elif item.status == "completed" and isinstance(item, CustomToolCallItem):
            self._tell(events, InputDone, item_id=item.id, input=item.input)
        self._finish(item, events)
        self._open = None

    def _finish(self, item: Item, events: list[ResponseEvent]) -> None:
        self._tell(events, OutputItemDone, item=item)
        self._done.append(item)

    def _item_id(self, kind: str, events: list[ResponseEvent]) -> str:
        """Close the open item, and return the id of the next one."""
        self._close("completed", events)
        return f"{kind}_{self._stem}_{len(self._done)}"


def _without_end(logprobs: tuple[LogprobInfo, ...], text: str) -> tuple[LogprobInfo, ...]:
    """Drop the token that ended the answer and has no text: it may or may not come in one part with
    the last text.
    """
    shown, length = text.encode(), 0
    for count, info in enumerate(logprobs):
        if length == len(shown) and count:
            tokens = b"".join(bytes(one.bytes) for one in logprobs[:count])
            return logprobs[:count] if tokens == shown else logprobs
        length += len(info.bytes)
    return logprobs
