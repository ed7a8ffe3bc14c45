"""Endpoint ``POST /v1/chat/completions``."""

from __future__ import annotations

import msgspec

from millrace.gateway.rendering.rendering import (
    ChunkRenderer,
    encode,
    usage_info,
)
from millrace.gateway.rendering.tokens import logprob_infos, prompt_tokens
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    PartEvents,
    ReasoningPart,
    StepPart,
)
from millrace.registry.tool_formats.freeform import input_of
from millrace.schemas.chat.completions import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ToolStepInfo,
)
from millrace.schemas.chat.messages import CalledCustom, CalledFunction, MessageToolCall
from millrace.schemas.notices import field_of
from millrace.schemas.openai import (
    ChatCompletionRequest,
    ChoiceLogprobs,
    LogprobInfo,
)
from millrace.schemas.tools import ToolCall

_NOT_FINISHED = b',"finish_reason":null'
_NO_LOGPROBS = b',"logprobs":null' + _NOT_FINISHED
_AFTER_TEXT = b"}" + _NO_LOGPROBS


class ChatRenderer(ChunkRenderer):
    """Renderer of ``chat.completion.chunk`` events and the ``chat.completion`` body."""

    def __init__(self, response: ResponseReader, request: ChatCompletionRequest) -> None:
        super().__init__("chat.completion.chunk", response, request.stream_options)
        self._request = request
        self._with_logprobs = response.request.sampling.logprobs is not None
        num_choices = len(response.choices)
        self._text_befores = [before + b',"delta":{"content":' for before in self._befores]
        is_plain = (
            num_choices == 1
            and not self._with_logprobs
            and self._told is None
            and not self._is_continuous
        )
        self.plain = (self._text_befores[0], _AFTER_TEXT + self._after(0)) if is_plain else None
        self._logprobs: list[list[LogprobInfo]] = [[] for _ in range(num_choices)]
        self._steps: list[ToolStepInfo] = []

    def first(self) -> bytes:
        role: dict[str, object] = {"role": "assistant", "content": ""}
        chunks = [self._delta(i, role) for i in range(len(self._befores))]
        if self._told is not None:
            told = self._after_first("prompt_token_ids", self._response.prompt_token_ids(0))
            chunks[0] = chunks[0].removesuffix(self._after(0)) + told
        events = b"".join(chunks)
        if self._response.session is not None:
            events += self._without_choices("session", self._response.session)
        return events

    def part(self, part: Part) -> PartEvents:
        if type(part) is AnswerText:
            if part.logprobs or self._told:
                return PartEvents(delta=self._delta(part.choice, {"content": part.text}, part))
            if not part.text:
                return PartEvents()
            text = self._text_befores[part.choice] + encode(part.text)
            return PartEvents(delta=text + _AFTER_TEXT + self._after(part.choice))
        if isinstance(part, ReasoningPart):
            return PartEvents(delta=self._reasoning(part))
        if isinstance(part, CallStart):
            kind, key = ("custom", "input") if part.custom else ("function", "arguments")
            called = {"name": part.name, key: ""}
            call = {"index": part.call, "id": part.call_id, "type": kind, kind: called}
            return PartEvents(self._delta(part.choice, {"tool_calls": [call]}))
        if isinstance(part, CallArguments):
            kind, key = ("custom", "input") if part.custom else ("function", "arguments")
            call = {"index": part.call, kind: {key: part.text}}
            return PartEvents(delta=self._delta(part.choice, {"tool_calls": [call]}))
        if isinstance(part, StepPart):
            return PartEvents(self._without_choices("tool_step", _step_info(part)))
        assert isinstance(part, ChoiceEnd)
        end = b',"delta":{},"logprobs":null,"finish_reason":' + self._end(part)
        return PartEvents(self._befores[part.choice] + end)

    def add(self, part: Part) -> None:
        if isinstance(part, AnswerText | ReasoningPart):
            self._logprobs[part.choice] += self._infos(part)
            if self._told is not None:
                self._told.add(part)
        elif isinstance(part, StepPart):
            self._steps.append(_step_info(part))

    def whole(self) -> bytes:
        response = self._response
        return encode(
            ChatCompletion(
                id=response.request_id,
                created=response.created_s,
                model=response.request.model,
                choices=tuple(self._choice(i) for i in range(len(response.choices))),
                usage=usage_info(response.usage),
                service_tier=self._request.service_tier or msgspec.UNSET,
                metadata=self._request.metadata or msgspec.UNSET,
                session=response.session or msgspec.UNSET,
                tool_steps=tuple(self._steps) or msgspec.UNSET,
                prompt_logprobs=prompt_tokens(response, 0),
                prompt_token_ids=response.prompt_token_ids(0) if self._told else msgspec.UNSET,
                notices=field_of(response.notices),
            )
        )

    def _choice(self, index: int) -> ChatChoice:
        response = self._response
        choice = response.choices[index]
        text, calls = choice.text, choice.client_calls
        reasoning = choice.reasoning if response.request.include_reasoning else ""
        tool_calls = tuple(map(self._called, calls))
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=None if calls and not text else text,
                reasoning_content=reasoning or msgspec.UNSET,
                reasoning=reasoning or msgspec.UNSET,
                tool_calls=tool_calls or msgspec.UNSET,
            ),
            finish_reason=choice.reason,
            stop_reason=choice.stop_reason,
            logprobs=ChoiceLogprobs(content=tuple(self._logprobs[index]))
            if self._with_logprobs
            else None,
            token_ids=self._told.of_choice(index) if self._told else msgspec.UNSET,
        )

    def _called(self, call: ToolCall) -> MessageToolCall:
        if call.name in self._response.request.freeform_tools:
            custom = CalledCustom(name=call.name, input=input_of(call.arguments))
            return MessageToolCall(id=call.id, custom=custom, type="custom")
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return MessageToolCall(id=call.id, function=function)

    def _reasoning(self, part: ReasoningPart) -> bytes:
        """Return the chunk of a reasoning part. It has both field names that servers of thinking
        models use, since clients read one or the other.
        """
        text = part.text if self._response.request.include_reasoning else ""
        delta: dict[str, object] = {"reasoning_content": text, "reasoning": text} if text else {}
        if part.logprobs or self._told:
            return self._delta(part.choice, delta, part)
        return self._delta(part.choice, delta) if delta else b""

    def _infos(self, part: AnswerText | ReasoningPart) -> tuple[LogprobInfo, ...]:
        return logprob_infos(self._response.model.tokenizer, part.logprobs)

    def _delta(
        self,
        choice: int,
        delta: dict[str, object],
        told_of: AnswerText | ReasoningPart | None = None,
    ) -> bytes:
        """Return a chunk with the requested token data of ``told_of``."""
        body = b',"delta":' + encode(delta)
        if told_of is None or not told_of.logprobs:
            body += _NO_LOGPROBS
        else:
            infos = self._infos(told_of)
            body += b',"logprobs":' + encode(ChoiceLogprobs(content=infos)) + _NOT_FINISHED
        if told_of is not None and self._told is not None:
            body += b',"token_ids":' + encode(self._told.of_part(told_of))
        return self._befores[choice] + body + self._after(choice)


def _step_info(part: StepPart) -> ToolStepInfo:
    return ToolStepInfo(**part.told())
