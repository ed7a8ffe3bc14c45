"""Answer to a chat job, split into content, reasoning and tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from millrace.registry.reasoning import ReasoningParser
from millrace.registry.tool_formats import (
    ArgumentsPiece,
    CallPiece,
    ContentPiece,
    Piece,
    ToolCallParser,
    new_call_id,
)
from millrace.registry.tool_formats.freeform import InputReader
from millrace.registry.tool_formats.strictness import violations
from millrace.schemas.chat.messages import CalledCustom, CalledFunction, MessageToolCall
from millrace.schemas.frames import CustomDelta, FinishReason, FunctionDelta, ToolCallDelta
from millrace.schemas.jobs import AnswerForm, Job, asked_of
from millrace.schemas.notices import Notices
from millrace.schemas.tools import ToolCall, ToolFormat


class _Call:
    """Tool call that began with the token ``began``.

    ``texts`` maps tokens to the text that they added to its arguments or, for a custom tool, to its
    input.
    """

    def __init__(self, index: int, call_id: str, name: str, began: int, *, custom: bool) -> None:
        self.index = index
        self.call_id = call_id
        self.name = name
        self.began = began
        self.texts: dict[int, str] = {}
        self.last = began
        self._reader = InputReader() if custom else None

    def add(self, token: int, text: str) -> None:
        """Add text of a token to the arguments or input."""
        shown = text if self._reader is None else self._reader.feed(text)
        self.texts[token] = self.texts.get(token, "") + shown
        self.last = token

    def between(self, start: int, end: int) -> list[str]:
        """Return the text that each of these tokens added."""
        return [self.texts.get(token, "") for token in range(start, end)]

    def delta(self, text: str, *, is_first: bool) -> ToolCallDelta:
        """Return a delta with more of the text; the first delta also has id, type and name."""
        name = self.name if is_first else ""
        is_custom = self._reader is not None
        delta = ToolCallDelta(
            index=self.index,
            function=UNSET if is_custom else FunctionDelta(arguments=text, name=name),
            custom=CustomDelta(input=text, name=name) if is_custom else UNSET,
        )
        if not is_first:
            return delta
        return replace(delta, id=self.call_id, type="custom" if is_custom else "function")

    def as_tool_call(self) -> ToolCall:
        return ToolCall(id=self.call_id, name=self.name, arguments="".join(self.texts.values()))

    def whole(self) -> MessageToolCall:
        text = "".join(self.texts.values())
        if self._reader is not None:
            custom = CalledCustom(name=self.name, input=text)
            return MessageToolCall(id=self.call_id, custom=custom, type="custom")
        function = CalledFunction(name=self.name, arguments=text)
        return MessageToolCall(id=self.call_id, function=function)


class ChatAnswer:
    """Parser of the text that each token of one completion added.

    The parts of a token depend only on the tokens before it. So an answer that is computed again
    from the same tokens, on any worker, has the same pieces and the same ids of calls. Text that is
    held back comes with the token that decides its kind, or with the last token. After the end,
    ``notices`` name the calls of strict tools that do not fit their schemas.
    """

    def __init__(
        self,
        form: AnswerForm,
        job: Job,
        tool_format: ToolFormat | None,
        *,
        reads_calls: bool = False,
    ) -> None:
        """Create a parser; it reads calls from text if the form has tools, or if
        ``reads_calls``.
        """
        self._contents: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Call] = []
        self._includes_reasoning = form.include_reasoning
        self._freeform = frozenset(form.freeform)
        self.notices: Notices = ()
        self._unheld = form.tools if form.is_unheld else ()
        self._num_read_of_last = 0
        self._is_finished = self._is_cut = False
        reasoning = job.sampling.reasoning
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._parser: ToolCallParser | None = None
        if (form.tools or reads_calls) and tool_format is not None:
            numbers = itertools.count()
            self._parser = ToolCallParser(
                tool_format,
                lambda: new_call_id(tool_format, f"{job.request_id}/{next(numbers)}"),
                form.tools,
                must_call=form.must_call,
            )

    @classmethod
    def of(cls, job: Job, tool_format: ToolFormat | None) -> ChatAnswer | None:
        """Return the answer of a job that asks for its parts; None for another job, and for a beam
        search, whose answers have no deltas.
        """
        if job.answer is None or job.sampling.use_beam_search:
            return None
        return cls(job.answer, job, tool_format)

    @classmethod
    def read_by_gateway(cls, job: Job, tool_format: ToolFormat | None) -> ChatAnswer:
        """Return the answer of a job whose gateway reads calls from text, parsed as the gateway
        does.
        """
        asked = asked_of(job)
        form = AnswerForm(must_call=asked.must_call)
        return cls(form, job, tool_format, reads_calls=asked.reads_calls)

    @property
    def called_names(self) -> tuple[str, ...]:
        """Names of the called tools, in the order of the calls."""
        return tuple(call.name for call in self._calls)

    @property
    def is_certain(self) -> bool:
        """True if the end of the completion would add nothing to the parts of its last token."""
        if self._is_finished:
            return True
        if self._reasoning is not None:
            return self._reasoning.is_certain
        return self._parser is None or self._parser.is_certain

    def read(self, pieces: Sequence[str]) -> None:
        """Read new text in ``pieces``, which has the text that each token added."""
        num_read = len(self._contents)
        if num_read:
            self._take(pieces[num_read - 1][self._num_read_of_last :])
        for piece in pieces[num_read:]:
            self._contents.append("")
            self._thoughts.append("")
            self._take(piece)
        if pieces:
            self._num_read_of_last = len(pieces[-1])

    def finish(self, finish_reason: FinishReason | None, stop_reason: str | int | None) -> None:
        """Note that there are no further tokens. Without a ``finish_reason`` the completion
        failed.
        """
        if self._is_finished:
            return
        self._is_finished = True
        if not self._contents:
            return
        if self._reasoning is not None:
            thoughts, text = self._reasoning.finish()
            self._reasoning = None
            self._thoughts[-1] += thoughts
            self._parse(text)
        parser = self._parser
        if parser is not None:
            is_cut_off = finish_reason is FinishReason.LENGTH or (
                finish_reason is not None and isinstance(stop_reason, str)
            )
            self._tell(parser.finish(is_cut_off=is_cut_off))
            self._is_cut = parser.is_last_call_cut or (is_cut_off and parser.is_cut_in_call)
        if self._unheld and finish_reason is not None:
            whole = self._calls[: len(self._calls) - self._is_cut]
            self.notices = tuple(violations([call.as_tool_call() for call in whole], self._unheld))

    def finish_reason(self, ended: FinishReason) -> FinishReason:
        """Return the finish reason for the client of a completion that ``ended`` so."""
        has_called = ended is FinishReason.STOP and bool(self._calls) and not self._is_cut
        return FinishReason.TOOL_CALLS if has_called else ended

    def delta_fields(self, start: int, end: int) -> dict[str, Any]:
        """Return the fields of a delta for the tokens from ``start`` to ``end``, except tokens and
        log-probabilities.
        """
        contents = self._contents[start:end]
        thoughts = self._thoughts[start:end] if self._includes_reasoning else []
        fields: dict[str, Any] = {"text": "".join(contents), "text_ends": _ends(contents)}
        if any(thoughts):
            fields |= {"reasoning": "".join(thoughts), "reasoning_ends": _ends(thoughts)}
        calls = [call for call in self._calls if call.began < end and call.last >= start]
        if calls:
            texts = [call.between(start, end) for call in calls]
            fields["tool_calls"] = tuple(
                call.delta("".join(added), is_first=call.began >= start)
                for call, added in zip(calls, texts, strict=True)
            )
            fields["tool_call_ends"] = tuple(map(_ends, texts)) if end - start > 1 else ()
        return fields

    def result_fields(self) -> dict[str, Any]:
        """Return the text fields of a result."""
        num_tokens = len(self._contents)
        thoughts = self._thoughts if self._includes_reasoning else []
        return {
            "text": "".join(self._contents),
            "text_ends": tuple(_lengths(self._contents)),
            "reasoning": "".join(thoughts),
            "reasoning_ends": tuple(_lengths(thoughts)) if any(thoughts) else (),
            "tool_calls": tuple(call.whole() for call in self._calls),
            "tool_call_ends": tuple(
                tuple(_lengths(call.between(0, num_tokens))) for call in self._calls
            ),
        }

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
            self._thoughts[-1] += thoughts
            if not self._reasoning.ended:
                return
            self._reasoning = None
        self._parse(text)

    def _parse(self, text: str) -> None:
        if self._parser is None:
            self._contents[-1] += text
        else:
            self._tell(self._parser.push(text))

    def _tell(self, pieces: Sequence[Piece]) -> None:
        token = len(self._contents) - 1
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                self._contents[-1] += piece.text
            elif isinstance(piece, CallPiece):
                custom = piece.name in self._freeform
                number = len(self._calls)
                self._calls.append(_Call(number, piece.call_id, piece.name, token, custom=custom))
            elif isinstance(piece, ArgumentsPiece):
                self._calls[-1].add(token, piece.text)


def _lengths(texts: Sequence[str]) -> Iterator[int]:
    return accumulate(map(len, texts))


def _ends(texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(_lengths(texts)) if len(texts) > 1 else ()
