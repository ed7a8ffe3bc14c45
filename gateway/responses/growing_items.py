"""Items of an answer that are not whole yet."""

from __future__ import annotations

import msgspec

from millrace.gateway.responses.built_in_calls import built_in_item
from millrace.gateway.responses.thoughts import sealed
from millrace.gateway.responses.tools import CallKind
from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.call_items import (
    BuiltInCallItem,
    CustomToolCallItem,
    ItemStatus,
)
from millrace.schemas.responses.items import (
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


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
