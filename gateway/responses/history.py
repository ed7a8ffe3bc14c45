"""Conversion of a conversation's items to chat messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.gateway.responses.built_in_calls import called, told_output
from millrace.gateway.responses.tools import told_name
from millrace.schemas.chat.messages import (
    MESSAGE_OF_ROLE,
    CalledFunction,
    EchoedMessage,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.responses.call_items import (
    OtherCallItem,
    OtherOutputItem,
)
from millrace.schemas.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)

_INPUT = "input"


def messages_of(
    items: Sequence[Item], instructions: str | None, paths: Sequence[str] = ()
) -> tuple[Message, ...]:
    """Return the conversation as chat messages. An assistant's calls belong to the message before
    them, and thoughts to the message or call after them. Calls that were cut off are left out,
    unless they have an output. ``paths`` has the field of each item: it is empty for an item of an
    earlier request.

    Raises ParameterError for a result without a call and for a call without a result.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append(SystemMessage(content=instructions))
    answered = {
        item.call_id for item in items if isinstance(item, FunctionCallOutputItem | OtherOutputItem)
    }
    unanswered: dict[str, str] = {}
    thoughts: str | None = None
    for item, path in zip(items, paths or ("",) * len(items), strict=True):
        call = _call(item)
        if isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content)
        elif isinstance(item, MessageItem):
            text = "".join(part.text for part in item.content)
            message = MESSAGE_OF_ROLE[item.role](content=text)
            if isinstance(message, EchoedMessage):
                message = msgspec.structs.replace(message, reasoning_content=thoughts)
            messages.append(message)
            thoughts = None
        elif call is not None:
            if item.status != "incomplete" or call.id in answered:
                _add_call(messages, call, thoughts)
                unanswered[call.id] = path
                thoughts = None
        elif isinstance(item, FunctionCallOutputItem | OtherOutputItem):
            messages.append(_result(item, path, unanswered))
    for call_id, path in unanswered.items():
        where = f"{path}.call_id" if path else _INPUT
        raise ParameterError(
            where, f"{where}: there is no output of the call {call_id!r:.100} in input."
        )
    return tuple(messages)


def _call(item: Item) -> MessageToolCall | None:
    """Return the call of an item as the model made it; None for other items."""
    if isinstance(item, FunctionCallItem):
        function = CalledFunction(name=item.name, arguments=item.arguments)
    elif isinstance(item, OtherCallItem):
        function = called(item)
    else:
        return None
    namespace = getattr(item, "namespace", msgspec.UNSET)
    if namespace is not msgspec.UNSET:
        name = told_name(function.name, namespace)
        function = msgspec.structs.replace(function, name=name)
    return MessageToolCall(id=item.call_id, function=function)


def _result(
    item: FunctionCallOutputItem | OtherOutputItem, path: str, unanswered: dict[str, str]
) -> ToolMessage:
    if unanswered.pop(item.call_id, None) is None:
        where = f"{path}.call_id" if path else _INPUT
        raise ParameterError(
            where, f"{where}: there is no call for the output of {item.call_id!r:.100} in input."
        )
    output = item.output if isinstance(item, FunctionCallOutputItem) else told_output(item)
    return ToolMessage(content=output, tool_call_id=item.call_id)


def _add_call(messages: list[Message], call: MessageToolCall, thoughts: str | None) -> None:
    if messages and isinstance(messages[-1], EchoedMessage) and thoughts is None:
        calls = (*(messages[-1].tool_calls or ()), call)
        messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
    else:
        messages.append(EchoedMessage(content="", tool_calls=(call,), reasoning_content=thoughts))
