"""From an answer's parts to the output items of the Responses API, and the events on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from millrace.gateway.responses.built_in_calls import built_in_item
from millrace.gateway.responses.normalised import sealed
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
    ApplyPatchCallItem,
    BuiltInCallItem,
    CustomToolCallItem,
    ItemStatus,
    LocalShellCallItem,
    ShellCallItem,
    ToolSearchCallItem,
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
# Prefixes of the ids of calls: of functions, of custom tools and of built-in tools.
_PREFIX = ("fc", "ctc")
_PREFIXES: Mapping[type[BuiltInCallItem], str] = {
    LocalShellCallItem: "lsh",
    ShellCallItem: "sh",
    ApplyPatchCallItem: "apc",
    ToolSearchCallItem: "tsc",
}


class GrowingMessage:
    """A message that grows."""

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
    """Reasoning that grows."""

    def __init__(self, item_id: str, *, seals: bool) -> None:
        self.item_id = item_id
        self.texts: list[str] = []
        self._seals = seals

    def content(self) -> ReasoningText:
        return ReasoningText("".join(self.texts))

    def item(self, status: ItemStatus) -> ReasoningItem:
        content = self.content()
        return ReasoningItem(
            id=self.item_id,
            content=(content,),
            encrypted_content=sealed(content.text) if self._seals else None,
            status=status,
        )


class GrowingCall:
    """A call whose arguments, or whose input, grow."""

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
    """The output of one answer as far as its parts were taken.

    Ids of items and sequence numbers depend on ``stem`` and on the joined content of the parts, not
    on how the content is cut into parts: a stream that is read again has the same ids and numbers.
    ``incomplete`` is the reason if the answer ended before the model was done. ``kinds`` has the
    kind of each tool's calls by the tool's name for the model; calls of other tools are calls of
    functions. If it ``seals`` thoughts, they are also in ``encrypted_content``.
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
        # Of tokens that showed no text yet: a part of a character, or of a call's markup.
        self._hidden: list[TokenLogprob] = []

    def number(self, advance: int = 1) -> int:
        """The sequence number of an event that tells of ``advance`` things."""
        self._next_number += advance
        return self._next_number - 1

    def items(self) -> tuple[Item, ...]:
        """All items; the last one may have been cut off."""
        if self._open is None:
            return tuple(self._done)
        return (*self._done, self._open.item("incomplete"))

    def add(self, part: Part) -> list[ResponseEvent]:
        """The events of a part."""
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

    def _take_text(self, part: AnswerText, events: list[ResponseEvent]) -> None:
        self._hidden += part.logprobs
        if not part.text:
            return
        message = self._message(events)
        logprobs = self._describe(self._hidden) if self._hidden else ()
        logprobs = _without_end(logprobs, part.text)
        self._hidden = []
        message.texts.append(part.text)
        message.logprobs += logprobs
        events.append(
            TextDelta(
                sequence_number=self.number(len(part.text)),
                item_id=message.item_id,
                output_index=len(self._done),
                delta=part.text,
                logprobs=logprobs,
            )
        )

    def _message(self, events: list[ResponseEvent]) -> GrowingMessage:
        """The open message; a new one if there is none."""
        if isinstance(self._open, GrowingMessage):
            return self._open
        self._close("completed", events)
        message = GrowingMessage(self._item_id("msg"))
        self._open = message
        in_progress = MessageItem(
            id=message.item_id, role="assistant", content=(), status="in_progress"
        )
        self._tell_of(in_progress, OutputText("", logprobs=()), events)
        return message

    def _take_thoughts(self, text: str, events: list[ResponseEvent]) -> None:
        if not text:
            return
        thoughts = self._open_thoughts(events)
        thoughts.texts.append(text)
        events.append(
            ReasoningDelta(
                sequence_number=self.number(len(text)),
                item_id=thoughts.item_id,
                output_index=len(self._done),
                delta=text,
            )
        )

    def _open_thoughts(self, events: list[ResponseEvent]) -> GrowingThoughts:
        if isinstance(self._open, GrowingThoughts):
            return self._open
        self._close("completed", events)
        thoughts = self._open = GrowingThoughts(self._item_id("rs"), seals=self._seals)
        in_progress = ReasoningItem(id=thoughts.item_id, content=(), status="in_progress")
        self._tell_of(in_progress, ReasoningText(""), events)
        return thoughts

    def _tell_of(
        self,
        item: MessageItem | ReasoningItem,
        part: OutputText | ReasoningText,
        events: list[ResponseEvent],
    ) -> None:
        """An item that begins, and the one part of its content."""
        index = len(self._done)
        events.append(OutputItemAdded(sequence_number=self.number(), output_index=index, item=item))
        events.append(
            ContentPartAdded(
                sequence_number=self.number(), item_id=item.id, output_index=index, part=part
            )
        )

    def _start_call(
        self, call_id: str, name: str, events: list[ResponseEvent], *, custom: bool = False
    ) -> None:
        self._close("completed", events)
        self._hidden = []
        kind = self._kinds.get(name) or CallKind(name)
        item_id = self._item_id(_PREFIXES[kind.built_in] if kind.built_in else _PREFIX[custom])
        self._open = GrowingCall(item_id, call_id, kind, custom=custom)
        item = self._open.item("in_progress")
        events.append(
            OutputItemAdded(sequence_number=self.number(), output_index=len(self._done), item=item)
        )

    def _take_arguments(self, text: str, events: list[ResponseEvent]) -> None:
        call = self._open
        assert isinstance(call, GrowingCall), "arguments follow the start of their call"
        if not text:
            return
        call.texts.append(text)
        if call.kind.built_in is not None:
            return
        number = self.number(len(text))
        kind = InputDelta if call.custom else ArgumentsDelta
        events.append(
            kind(
                sequence_number=number,
                item_id=call.item_id,
                output_index=len(self._done),
                delta=text,
            )
        )

    def _take_step(self, part: StepPart, events: list[ResponseEvent]) -> None:
        """A call of a tool of ours, and what it gave."""
        self._start_call(part.call_id, part.name, events)
        self._take_arguments(part.arguments, events)
        self._close("completed", events)
        item = FunctionCallOutputItem(
            id=self._item_id("fco"), call_id=part.call_id, output=part.output
        )
        events.append(
            OutputItemAdded(sequence_number=self.number(), output_index=len(self._done), item=item)
        )
        self._finish(item, events)

    def _end(self, part: ChoiceEnd, events: list[ResponseEvent]) -> None:
        if part.reason == LENGTH:
            self.incomplete = "max_output_tokens"
        elif part.is_call_cut:
            self.incomplete = "stop"
        if not self._done and self._open is None:
            # An answer of no words is a message too.
            self._message(events)
        is_whole = self.incomplete is None or (
            isinstance(self._open, GrowingCall) and not part.is_call_cut
        )
        self._close("completed" if is_whole else "incomplete", events)

    def _close(self, status: ItemStatus, events: list[ResponseEvent]) -> None:
        if isinstance(self._open, GrowingMessage):
            self._close_message(self._open, self._open.item(status), events)
        elif isinstance(self._open, GrowingThoughts):
            self._close_thoughts(self._open, self._open.item(status), events)
        elif self._open is not None:
            self._close_call(self._open.item(status), events)
        self._open = None

    def _close_message(
        self, message: GrowingMessage, item: MessageItem, events: list[ResponseEvent]
    ) -> None:
        content = message.content()
        index = len(self._done)
        events.append(
            TextDone(
                sequence_number=self.number(),
                item_id=item.id,
                output_index=index,
                text=content.text,
                logprobs=content.logprobs or (),
            )
        )
        events.append(
            ContentPartDone(
                sequence_number=self.number(), item_id=item.id, output_index=index, part=content
            )
        )
        self._finish(item, events)

    def _close_thoughts(
        self, thoughts: GrowingThoughts, item: ReasoningItem, events: list[ResponseEvent]
    ) -> None:
        content, index = thoughts.content(), len(self._done)
        events.append(
            ReasoningDone(
                sequence_number=self.number(),
                item_id=item.id,
                output_index=index,
                text=content.text,
            )
        )
        events.append(
            ContentPartDone(
                sequence_number=self.number(), item_id=item.id, output_index=index, part=content
            )
        )
        self._finish(item, events)

    def _close_call(
        self,
        item: FunctionCallItem | CustomToolCallItem | BuiltInCallItem,
        events: list[ResponseEvent],
    ) -> None:
        index = len(self._done)
        is_whole = item.status == "completed"
        if is_whole and isinstance(item, FunctionCallItem):
            events.append(
                ArgumentsDone(
                    sequence_number=self.number(),
                    item_id=item.id,
                    output_index=index,
                    name=item.name,
                    arguments=item.arguments,
                )
            )
        elif is_whole and isinstance(item, CustomToolCallItem):
            events.append(
                InputDone(
                    sequence_number=self.number(),
                    item_id=item.id,
                    output_index=index,
                    input=item.input,
                )
            )
        self._finish(item, events)

    def _finish(self, item: Item, events: list[ResponseEvent]) -> None:
        events.append(
            OutputItemDone(sequence_number=self.number(), output_index=len(self._done), item=item)
        )
        self._done.append(item)

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._stem}_{len(self._done)}"


def _without_end(logprobs: tuple[LogprobInfo, ...], text: str) -> tuple[LogprobInfo, ...]:
    """Without the token that ended the answer and shows no text: whether it comes in one part with
    the last text is chance."""
    shown, length = text.encode(), 0
    for count, info in enumerate(logprobs):
        if length == len(shown) and count:
            tokens = b"".join(bytes(one.bytes) for one in logprobs[:count])
            return logprobs[:count] if tokens == shown else logprobs
        length += len(info.bytes)
    return logprobs
