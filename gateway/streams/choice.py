"""Choice of an answer: converts a stream of tokens to parts, round after round of tools."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from millrace.bus.frame_reader import Progress
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    ReasoningPart,
)
from millrace.gateway.streams.stream import OpenStream, TokenGaps, total_usage, usage_so_far
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
from millrace.schemas.frames import Done, FinishReason, TerminalFrame, TokenLogprob, Usage
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.notices import Notice
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat

TOOL_CALLS = "tool_calls"
_LENGTH = FinishReason.LENGTH


class RoundEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the model in a round: thoughts, text, then calls."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]


class _Call:
    def __init__(self, call_id: str, name: str, *, custom: bool) -> None:
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []
        self.reader = InputReader() if custom else None

    def whole(self) -> ToolCall:
        return ToolCall(id=self.call_id, name=self.name, arguments="".join(self.arguments))


class ToldTools(NamedTuple):
    """Tools that the model was told of, the names of the gateway's ``own`` tools, and the names of
    tools with text as input. Calls of ``unheld`` tools are checked once they are complete.
    """

    definitions: Sequence[ToolDefinition] = ()
    own: frozenset[str] = frozenset()
    freeform: Collection[str] = ()
    unheld: Sequence[ToolDefinition] = ()


class Choice:
    """Choice that reads its stream, a new one in each round.

    ``next_index`` counts the tokens of all rounds that the client was given. The client does not
    see calls of the gateway's own tools. After a round with such calls, ``round_end`` has its
    output until ``start_round``; ``runs_tools`` is set while they run, and ``turns`` is the
    conversation of the rounds before. ``end`` is set when the stream of the last round has ended.
    ``had`` are the parts that the client was given by another connection, as far as they were read
    again; all precede the parts of ``collect``. A token of ``end_token_ids`` ends the stream: it is
    counted and has no log-probability, since it is not part of the answer's content. ``must_call``:
    the first round is held to calls of tools. ``is_call_cut``: the arguments of the last of
    ``client_calls`` are incomplete. ``notices`` are about its calls.
    """

    def __init__(
        self,
        index: int,
        stream: OpenStream,
        tool_format: ToolFormat | None,
        tools: ToldTools,
        from_index: int = 0,
        end_token_ids: frozenset[int] = frozenset(),
        *,
        must_call: bool = False,
    ) -> None:
        self.index = index
        self.stream = stream
        self.round = 0
        self.next_index = from_index
        self.end: TerminalFrame | None = None
        self.reason = ""
        self.stop_reason: str | int | None = None
        self.pending: list[Part] = []
        self.had: list[Part] = []
        self.client_calls: list[ToolCall] = []
        self.is_call_cut = False
        self.notices: list[Notice] = []
        self.round_end: RoundEnd | None = None
        self.runs_tools = False
        self.turns: list[ChatMessage] = []
        self._tool_format = tool_format
        self._tools = tools
        self._own_tools = tools.own
        self._end_token_ids = end_token_ids
        self._must_call = must_call
        self._earlier = Usage()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._num_shown_calls = 0
        self._base = 0
        self._enter_round()

    @property
    def is_plain(self) -> bool:
        """Return whether all output of this round is text, without thoughts or calls."""
        return self._parser is None and self._reasoning is None

    @property
    def text(self) -> str:
        """Return the text without thoughts and the markup of tool calls."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """Return the thoughts of all rounds."""
        return "".join(self._thoughts)

    @property
    def conversation(self) -> list[ChatMessage]:
        """Return the conversation so far, without thoughts: rounds of tools, then the last text and
        calls. A call that was cut is left out: it has no result.
        """
        earlier = sum(len(turn.content) for turn in self.turns if turn.role == "assistant")
        num_calls = len(self.client_calls) - self.is_call_cut
        text, calls = self.text[earlier:], tuple(self.client_calls[:num_calls])
        turns = [msgspec.structs.replace(turn, reasoning="") for turn in self.turns]
        if not (text or calls):
            return turns
        return [*turns, ChatMessage("assistant", text, tool_calls=calls)]

    def token_ids(self, first_index: int, num_tokens: int) -> tuple[int, ...]:
        """Return token ids of this round; ``first_index`` counts the tokens of all rounds."""
        begin = first_index - self._base
        return tuple(self.stream.reader.token_ids[begin : begin + num_tokens])

    @property
    def usage(self) -> Usage:
        """Return the usage of all rounds so far."""
        return total_usage((self._earlier, self.stream.reader.usage))

    @property
    def usage_so_far(self) -> Usage | None:
        """Return the usage of all rounds so far, as the client was told; None while no worker has
        begun. A prompt that another choice pays for is the prompt of this choice as well.
        """
        usage = usage_so_far(self.stream)
        if usage is None and not self.round:
            return None
        both = total_usage((self._earlier, usage))
        started = self.stream.reader.started
        shared = started.num_prompt_tokens if started and self.stream.job.shares_prompt else 0
        return msgspec.structs.replace(
            both,
            prompt_tokens=both.prompt_tokens + shared,
            completion_tokens=self.next_index,
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all rounds so far."""
        return self._base + self.stream.reader.next_index

    def is_between_rounds(self) -> bool:
        """Return whether the gateway's tools were called and no further round has begun."""
        return self.round_end is not None

    def start_round(self, stream: OpenStream, *, may_call: bool) -> None:
        """Continue with the stream of the next round, in which calls are text unless
        ``may_call``.
        """
        self._earlier = self.usage
        self._base += self.stream.reader.next_index
        self.stream = stream
        self.round += 1
        self.round_end = None
        if not may_call:
            self._tool_format = None
        self._enter_round()

    def end_with(self, reason: str) -> None:
        """End the choice without a further round."""
        self.round_end = None
        self.end = self.stream.reader.terminal
        self.reason = reason
        self.pending.append(ChoiceEnd(self.index, reason))

    def fail(self, frame: TerminalFrame) -> None:
        """End the choice with ``frame``, regardless of its stream."""
        self.round_end = None
        self.end = frame

    def collect(self, now_s: float, gaps: TokenGaps, parts: list[Part]) -> None:
        """Append the parts since the last call."""
        if self.pending:
            parts += self.pending
            self.pending.clear()
        stream = self.stream
        if self.end is not None or self.round_end is not None:
            # The tools' results or failure will wake the client again.
            stream.is_ready = False
            return
        index, num_tokens, text, logprobs = stream.read(now_s, gaps)
        if num_tokens or text:
            if logprobs and logprobs[-1].token_id in self._end_token_ids:
                logprobs = logprobs[:-1]
            self._before(index)
            index += self._base
            self.next_index = index + num_tokens
            self._take(text, index, num_tokens, logprobs, parts)
        if stream.reader.terminal is not None:
            self._end_round(stream.reader.terminal, parts)

    def read_plain(self, now_s: float, gaps: TokenGaps) -> Progress | None:
        """Return the progress of a text-only choice, cheaper than ``collect``; None if the choice
        has more than text, and then nothing was taken. This is the token path at load.
        """
        stream = self.stream
        if (
            not self.is_plain
            or stream.reader.terminal is not None
            or self.end is not None
            or self.pending
        ):
            return None
        progress = stream.read(now_s, gaps)
        num_tokens = progress.num_tokens
        if num_tokens:
            if not self._is_primed:
                self._before(progress.first_index)
            self.next_index = self._base + progress.first_index + num_tokens
            self._texts.append(progress.text)
        return progress

    def _enter_round(self) -> None:
        self._calls: list[_Call] = []
        self._round_texts: list[str] = []
        self._round_thoughts: list[str] = []
        reasoning = self.stream.job.sampling.reasoning
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._parser: ToolCallParser | None = None
        self._is_primed = False
        if self._tool_format is not None:
            must_call = self._must_call and not self.round
            new_id = self._id_maker(self._tool_format)
            self._parser = ToolCallParser(
                self._tool_format, new_id, self._tools.definitions, must_call=must_call
            )

    def _id_maker(self, tool_format: ToolFormat) -> Callable[[], str]:
        """Return a generator of ids that are the same whenever and wherever the stream is read."""
        seed = self.stream.request_id
        numbers = itertools.count()

        def make() -> str:
            return new_call_id(tool_format, f"{seed}/{next(numbers)}")

        return make

    def _before(self, num_tokens: int) -> None:
        """Take in the tokens that the client had before this stream was taken over."""
        if self._is_primed:
            return
        self._is_primed = True
        before = self.stream.reader.text_before
        if not (before or num_tokens):
            return
        self._take(before, self._base, num_tokens, (), self.had)

    def _take(
        self,
        text: str,
        index: int,
        num_tokens: int,
        logprobs: tuple[TokenLogprob, ...],
        parts: list[Part],
    ) -> None:
        """Append the parts of ``num_tokens`` more tokens."""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
            if not self._reasoning.ended:
                self._think(thoughts, index, num_tokens, logprobs, parts)
                return
            self._reasoning = None
            self._think(thoughts, index, 0, (), parts)
        if self._parser is None:
            self._texts.append(text)
            parts.append(AnswerText(self.index, index, num_tokens, text, logprobs))
        else:
            self._parse(self._parser.push(text), index, num_tokens, logprobs, parts)

    def _think(
        self,
        thoughts: str,
        index: int,
        num_tokens: int,
        logprobs: tuple[TokenLogprob, ...],
        parts: list[Part],
    ) -> None:
        if num_tokens or thoughts:
            self._thoughts.append(thoughts)
            self._round_thoughts.append(thoughts)
            parts.append(ReasoningPart(self.index, index, num_tokens, thoughts, logprobs))

    def _parse(
        self,
        pieces: list[Piece],
        index: int,
        num_tokens: int,
        logprobs: tuple[TokenLogprob, ...],
        parts: list[Part],
    ) -> None:
        told: list[Part] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                self._say(piece.text, index + num_tokens, told)
            elif isinstance(piece, CallPiece):
                custom = piece.name in self._tools.freeform
                self._calls.append(_Call(piece.call_id, piece.name, custom=custom))
                if piece.name not in self._own_tools:
                    number = self._num_shown_calls
                    told.append(CallStart(self.index, number, piece.call_id, piece.name, custom))
                    self._num_shown_calls += 1
            elif isinstance(piece, ArgumentsPiece):
                call = self._calls[-1]
                call.arguments.append(piece.text)
                if call.name not in self._own_tools:
                    custom = call.reader is not None
                    shown = piece.text if call.reader is None else call.reader.feed(piece.text)
                    number = self._num_shown_calls - 1
                    if shown:
                        told.append(CallArguments(self.index, number, shown, custom))
        if num_tokens:
            text = ""
            if told and isinstance(told[0], AnswerText):
                text = told[0].text
                del told[0]
            parts.append(AnswerText(self.index, index, num_tokens, text, logprobs))
        parts += told

    def _say(self, text: str, index: int, told: list[Part]) -> None:
        """Append text, in one part with text right before it."""
        if not text:
            return
        self._texts.append(text)
        self._round_texts.append(text)
        last = told[-1] if told else None
        if isinstance(last, AnswerText):
            told[-1] = last._replace(text=last.text + text)
        else:
            told.append(AnswerText(self.index, index, 0, text))

    def _end_round(self, terminal: TerminalFrame, parts: list[Part]) -> None:
        self._before(self.stream.reader.next_index)
        if self._reasoning is not None:
            thoughts, text = self._reasoning.finish()
            self._reasoning = None
            self._think(thoughts, self.next_index, 0, (), parts)
            if text:
                self._take(text, self.next_index, 0, (), parts)
        is_cut = False
        parser = self._parser
        if parser is not None:
            is_cut_off = isinstance(terminal, Done) and (
                terminal.finish_reason is _LENGTH or isinstance(terminal.stop_reason, str)
            )
            pieces = parser.finish(is_cut_off=is_cut_off)
            self._parse(pieces, self.next_index, 0, (), parts)
            is_cut = parser.is_last_call_cut or (is_cut_off and parser.is_cut_in_call)
            self.is_call_cut = (
                parser.is_last_call_cut and self._calls[-1].name not in self._own_tools
            )
        if not isinstance(terminal, Done):
            self.end = terminal
            return
        calls = tuple(call.whole() for call in self._calls)
        self.client_calls += [call for call in calls if call.name not in self._own_tools]
        if self._tools.unheld:
            self.notices += violations(calls[: len(calls) - is_cut], self._tools.unheld)
        has_called = terminal.finish_reason is FinishReason.STOP and bool(calls) and not is_cut
        if has_called and any(call.name in self._own_tools for call in calls):
            self.round_end = RoundEnd(
                reasoning="".join(self._round_thoughts),
                text="".join(self._round_texts),
                calls=calls,
            )
            return
        self.end = terminal
        self.reason = TOOL_CALLS if has_called else terminal.finish_reason.value
        self.stop_reason = terminal.stop_reason
        parts.append(ChoiceEnd(self.index, self.reason, self.stop_reason, self.is_call_cut))


class BeamChoice(Choice):
    """Choice for the ``beam``-th best answer of its stream's job. The best answer reports the job's
    usage, so that it counts once. A client that has any of its tokens has them all.
    """

    def __init__(
        self,
        index: int,
        beam: int,
        stream: OpenStream,
        tool_format: ToolFormat | None,
        tools: ToldTools,
        from_index: int = 0,
    ) -> None:
        super().__init__(index, stream, tool_format, tools, from_index)
        self._beam = beam

    @property
    def is_plain(self) -> bool:
        """Return False: a beam search has no output before its end."""
        return False

    def token_ids(self, first_index: int, num_tokens: int) -> tuple[int, ...]:
        """Return token ids of the answer."""
        beam = self.stream.reader.beams[self._beam]
        return tuple(beam.token_ids[first_index : first_index + num_tokens])

    @property
    def usage(self) -> Usage:
        """Return the usage of the whole search for the best answer; zero for the others."""
        return super().usage if self._beam == 0 else Usage()

    def collect(self, now_s: float, gaps: TokenGaps, parts: list[Part]) -> None:
        """Append the whole answer once the stream has ended."""
        self.stream.read(now_s, gaps)
        end = self.stream.reader.terminal
        if end is None or self.end is not None:
            return
        if isinstance(end, Done):
            found = self.stream.reader.beams[self._beam]
            own = end.beams[self._beam]
            was_given = self.next_index > 0
            self.next_index = own.num_tokens
            to = self.had if was_given else parts
            self._take(found.text, 0, own.num_tokens, (), to)
            if not was_given:
                self.stream.note_delivered(own.num_tokens, now_s)
            end = replace(end, finish_reason=own.finish_reason, stop_reason=own.stop_reason)
        self._end_round(end, parts)
