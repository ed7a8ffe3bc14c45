"""Conversation of a Messages request, converted for chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from millrace.gateway.messages.readable import result_text, text_of
from millrace.registry.requests.decoding import decode
from millrace.schemas.anthropic.blocks import (
    CompactionBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    ReadableBlock,
    SearchResultBlock,
    ServerCall,
    ServerResult,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolChange,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolSearchResult,
    ToolUseBlock,
    UnreadableBlock,
)
from millrace.schemas.anthropic.requests import ROLES, GivenMessage, MessagesRequest, MessagesTool
from millrace.schemas.chat.messages import (
    CalledFunction,
    EchoedMessage,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from millrace.schemas.chat.unreadable import sentence_for
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice, NoticeCode, notice

_ALLOWED = {
    "user": (TextBlock, SearchResultBlock, DocumentBlock, ToolResultBlock),
    "assistant": (
        TextBlock,
        ImageBlock,
        ToolUseBlock,
        ThinkingBlock,
        ServerCall,
        ServerResult,
        CompactionBlock,
        UnreadableBlock,
    ),
    "system": (TextBlock, ToolChange),
}
_Blocks = list[tuple[str, ContentBlock]]
_TOOL = msgspec.json.Decoder(MessagesTool)
# Only the provider's server can run this search, so no search would find deferred tools here.
_SERVER_SEARCH = "tool_search_tool"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Conversation so far: the messages, the offered tools, the effort that the last turn asks for,
    and notices of content that the model cannot read.
    """

    messages: tuple[Message, ...]
    tools: HistoryTools
    effort: str | None
    notices: tuple[Notice, ...]


def history_of(request: MessagesRequest) -> History:
    """Read the history of a request. Consecutive turns of one role are one turn. Results of tools
    are separate messages, before the text of the same turn. The answer continues a last turn of the
    assistant.

    Raises ParameterError for a block that its role must not have, for a result without a call and
    for a call without a result.
    """
    if not request.messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    leading = (SystemMessage(content=request.system),) if request.system else ()
    reader = _Reader(leading, HistoryTools(request.tools or ()))
    turns = _numbered(request.messages)
    for role, same in groupby(turns, lambda one: one[1].role):
        blocks = [block for where, turn in same for block in _blocks(where, turn)]
        if role == "user":
            reader.read_user(blocks)
        elif role == "system":
            reader.read_system(blocks)
        else:
            reader.read_assistant(blocks)
    reader.finish()
    if not reader.messages:
        raise ParameterError("messages", "messages must hold at least one message with text.")
    return History(
        messages=tuple(reader.messages),
        tools=reader.tools,
        effort=_effort(request.messages),
        notices=(*reader.notices, *reader.tools.notices),
    )


def _numbered(messages: Sequence[GivenMessage]) -> list[tuple[str, GivenMessage]]:
    """Return the turns with their paths. The text of a system turn that the user's next turn clears
    is left out, as its sender asks.
    """
    last_user = max((i for i, turn in enumerate(messages) if turn.role == "user"), default=-1)
    turns = []
    for i, turn in enumerate(messages):
        where = f"messages[{i}]"
        _check(where, turn)
        if turn.clear_at == "next_user_message" and i < last_user:
            kept = turn.content if isinstance(turn.content, tuple) else ()
            kept = tuple(TextBlock(text="") if isinstance(b, TextBlock) else b for b in kept)
            turn = msgspec.structs.replace(turn, content=kept)
        turns.append((where, turn))
    return turns


def _check(where: str, turn: GivenMessage) -> None:
    if turn.role not in ROLES:
        raise ParameterError(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}.")
    if turn.role == "system":
        if turn.content is None and turn.output_config is None:
            raise ParameterError(f"{where}.content", f"{where}.content is required.")
        return
    if turn.content is None:
        raise ParameterError(f"{where}.content", f"{where}.content is required.")
    for name in ("clear_at", "output_config"):
        if getattr(turn, name) is not None:
            raise ParameterError(
                f"{where}.{name}", f"{where}.{name} goes with the role system only; leave it out."
            )


def _effort(messages: Sequence[GivenMessage]) -> str | None:
    """Return the effort that system turns after the assistant's last turn ask for."""
    for turn in reversed(messages):
        if turn.role == "assistant":
            return None
        if turn.output_config is not None and turn.output_config.effort is not None:
            return turn.output_config.effort
    return None


def _blocks(where: str, message: GivenMessage) -> _Blocks:
    """Return the blocks of a turn, each with its path."""
    content = message.content
    if content is None:
        return []
    if isinstance(content, str):
        return [(f"{where}.content", TextBlock(text=content))]
    blocks = [(f"{where}.content[{i}]", block) for i, block in enumerate(content)]
    for path, block in blocks:
        if isinstance(block, ImageBlock) and message.role != "assistant":
            raise ParameterError(
                f"{path}.type", f"{path}.type: this model takes text only, not {block.type!r}."
            )
        if not isinstance(block, _ALLOWED[message.role]):
            raise ParameterError(
                f"{path}.type",
                f"{path}.type: a message of the role {message.role} has no {block.type} blocks.",
            )
    return blocks


class _Reader:
    """Reader of turns. It places a system turn between a call and its result after the result,
    since templates need a result right after its call.
    """

    def __init__(self, leading: Sequence[Message], tools: HistoryTools) -> None:
        self.tools = tools
        self.messages = list(leading)
        self._leading = leading
        self.notices: list[Notice] = []
        self._held: list[Message] = []
        self._unanswered: dict[str, str] = {}
        self._server_calls: dict[str, str] = {}

    def read_system(self, blocks: _Blocks) -> None:
        texts = []
        for path, block in blocks:
            if isinstance(block, ToolChange):
                self.tools.change(path, block)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
        text = "".join(texts)
        if text:
            place = self._held if self._unanswered else self.messages
            place.append(SystemMessage(content=text))

    def read_user(self, blocks: _Blocks) -> None:
        said: list[tuple[str, ReadableBlock]] = []
        num_before = len(self.messages)
        for path, block in blocks:
            if isinstance(block, ToolResultBlock):
                if said:
                    raise ParameterError(
                        path, f"{path}: tool_result blocks must come before the text of a message."
                    )
                self._read_result(path, block)
            elif isinstance(block, ReadableBlock):
                said.append((path, block))
        if said:
            self._refuse_unanswered()
        if not self._unanswered:
            self.messages += self._held
            self._held.clear()
        if said or len(self.messages) == num_before:
            self.messages.append(UserMessage(content=text_of(said)))

    def read_assistant(self, blocks: _Blocks) -> None:
        self._refuse_unanswered()
        turn = _Turn()
        num_before = len(self.messages)
        for path, block in blocks:
            if isinstance(block, TextBlock):
                turn.texts.append(block.text)
            elif isinstance(block, ImageBlock):
                turn.texts.append(f"\n{sentence_for(block.type)}\n")
                self._leave_out(path, block.type)
            elif isinstance(block, ThinkingBlock):
                turn.thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock | ServerCall):
                is_server = not isinstance(block, ToolUseBlock)
                (self._server_calls if is_server else self._unanswered)[block.id] = path
                turn.calls.append(_call(block))
            elif isinstance(block, ServerResult):
                self._read_server_result(path, block, turn)
            elif isinstance(block, CompactionBlock):
                self._compact(path, block, turn)
                num_before = len(self.messages)
            elif isinstance(block, UnreadableBlock):
                self._leave_out(path, block.type)
        if turn or len(self.messages) == num_before:
            self.messages.append(turn.message())

    def finish(self) -> None:
        """Raise ParameterError for calls without results."""
        self._refuse_unanswered()
        for call_id, path in self._server_calls.items():
            raise ParameterError(
                path,
                f"{path}: the history has no result of {call_id!r:.100}, and Millrace does not run "
                "another provider's server tools; leave the block out.",
            )

    def _read_result(self, path: str, block: ToolResultBlock) -> None:
        if self._unanswered.pop(block.tool_use_id, None) is None:
            raise ParameterError(
                f"{path}.tool_use_id",
                f"{path}.tool_use_id: no tool_use block before it has the id "
                f"{block.tool_use_id!r:.100}.",
            )
        content = block.content or ""
        if not isinstance(content, str):
            parts = [(f"{path}.content[{i}]", part) for i, part in enumerate(content)]
            content = text_of(parts, self.notices)
            for where, part in parts:
                if isinstance(part, ToolReferenceBlock):
                    self.tools.find(part.tool_name, where)
        self._add_result(block.tool_use_id, content, is_error=bool(block.is_error))

    def _read_server_result(self, path: str, block: ServerResult, turn: _Turn) -> None:
        if self._server_calls.pop(block.tool_use_id, None) is None:
            raise ParameterError(
                f"{path}.tool_use_id",
                f"{path}.tool_use_id: no server_tool_use or mcp_tool_use block before it has the "
                f"id {block.tool_use_id!r:.100}.",
            )
        if turn:
            self.messages.append(turn.message())
            turn.clear()
        content, left_out = result_text(block.content)
        for name in left_out:
            self._leave_out(f"{path}.content", f"{block.type}.{name}")
        if isinstance(block, ToolSearchResult):
            for name in _references(block.content):
                self.tools.find(name, path)
        self._add_result(block.tool_use_id, content, is_error=bool(block.is_error))

    def _add_result(self, call_id: str, content: str, *, is_error: bool) -> None:
        """Add the result of a call. Templates have no failed calls, so the text says it."""
        text = f"Error: {content}" if is_error else content
        self.messages.append(ToolMessage(content=text, tool_call_id=call_id))

    def _compact(self, path: str, block: CompactionBlock, turn: _Turn) -> None:
        for i, change in enumerate(block.tool_changes or ()):
            self.tools.change(f"{path}.tool_changes[{i}]", change)
        if block.content is None:
            if block.encrypted_content:
                self._leave_out(path, "compaction.encrypted_content")
            return
        self.messages = [*self._leading, UserMessage(content=block.content)]
        self._unanswered.clear()
        self._server_calls.clear()
        turn.clear()

    def _leave_out(self, path: str, detail: str) -> None:
        self.notices.append(notice(NoticeCode.CONTENT_LEFT_OUT, path, detail))

    def _refuse_unanswered(self) -> None:
        for call_id, path in self._unanswered.items():
            raise ParameterError(
                path,
                f"{path}: the next message of the user must have the tool_result of "
                f"{call_id!r:.100}.",
            )


class _Turn:
    """Texts, thoughts and calls of the assistant until a result."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[MessageToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.texts or self.thoughts or self.calls)

    def clear(self) -> None:
        self.texts.clear()
        self.thoughts.clear()
        self.calls.clear()

    def message(self) -> EchoedMessage:
        return EchoedMessage(
            content="".join(self.texts),
            tool_calls=tuple(self.calls) or None,
            reasoning_content="".join(self.thoughts) or None,
        )


def _call(block: ToolUseBlock | ServerCall) -> MessageToolCall:
    given = block.input
    arguments = given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
    return MessageToolCall(
        id=block.id, function=CalledFunction(name=block.name, arguments=arguments or "{}")
    )


def _references(content: Any) -> list[str]:
    """Return the names of the tools that a search of the provider found."""
    references = content.get("tool_references") if isinstance(content, dict) else None
    if not isinstance(references, list):
        return []
    names = [one.get("tool_name") for one in references if isinstance(one, dict)]
    return [name for name in names if isinstance(name, str)]


class HistoryTools:
    """Tools of a request. A tool with ``defer_loading`` is offered once the history refers to it.
    Such tools are offered from the start if no others are, or if only the provider's search could
    find them. ``notices`` name the tools that the history adds and that are unknown here.
    """

    def __init__(self, tools: Sequence[MessagesTool]) -> None:
        self.notices: list[Notice] = []
        self._tools = [(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
        self._defined: dict[str, tuple[str, MessagesTool]] = {}
        has_search = any((tool.type or "").startswith(_SERVER_SEARCH) for tool in tools)
        own = [tool for tool in tools if tool.type in (None, "custom")]
        deferred = {tool.name for tool in own if tool.defer_loading}
        self._hidden = set() if has_search or len(deferred) == len(own) else deferred
        self._removed: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, MessagesTool]]:
        """Iterate over the tools that are offered in the end, each with its path."""
        given = [one for one in self._tools if one[1].name not in self._defined]
        left_out = self._hidden | self._removed
        for path, tool in (*given, *self._defined.values()):
            if tool.name not in left_out:
                yield path, tool

    def find(self, name: str, path: str) -> None:
        """Offer a tool that a search has found."""
        if self._has(name):
            self._hidden.discard(name)
        else:
            self.notices.append(notice(NoticeCode.TOOL_LEFT_OUT, path, name))

    def change(self, path: str, block: ToolChange) -> None:
        """Add or remove a tool. Raises ParameterError for an unknown tool."""
        path = f"{path}.tool"
        kind = block.tool.get("type")
        if kind in ("mcp_tool_reference", "mcp_toolset_reference"):
            name = block.tool.get("name") or block.tool.get("server_name")
            self.notices.append(notice(NoticeCode.TOOL_LEFT_OUT, path, str(name)))
            return
        if kind == "tool_definition" and isinstance(block, ToolAdditionBlock):
            tool = _definition(f"{path}.definition", block.tool.get("definition"))
            self._defined[tool.name] = (f"{path}.definition", tool)
            name = tool.name
        elif kind == "tool_reference":
            name = self._referenced(path, block.tool.get("name"))
        else:
            raise ParameterError(
                f"{path}.type",
                f"{path}.type: a {block.type} block cannot have the type {kind!r:.100}.",
            )
        if isinstance(block, ToolAdditionBlock):
            self._hidden.discard(name)
            self._removed.discard(name)
        else:
            self._removed.add(name)

    def _has(self, name: str) -> bool:
        return name in self._defined or any(tool.name == name for _, tool in self._tools)

    def _referenced(self, path: str, name: Any) -> str:
        if not isinstance(name, str) or not self._has(name):
            raise ParameterError(
                f"{path}.name",
                f"{path}.name: there is no tool {name!r:.100} in tools or in an earlier block.",
            )
        return name


def _definition(path: str, definition: Any) -> MessagesTool:
    try:
        return decode(_TOOL, msgspec.json.encode(definition))
    except ParameterError as error:
        where = f"{path}.{error.param}" if error.param else path
        raise ParameterError(where, f"{path}: {error.message}") from error
