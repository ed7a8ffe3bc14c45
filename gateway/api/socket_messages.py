"""One generation on a socket, and its messages. A delta costs a concatenation."""

from __future__ import annotations

import msgspec

from bus.frame_reader import Progress
from gateway.errors import Refusal
from gateway.rendering.chunks import usage_info
from gateway.rendering.logprobs import logprob_infos
from gateway.request.response_stream import ResponseStream
from gateway.request.tracing import RequestTrace
from gateway.streams.parts import CallArguments, CallStart, ChoiceEnd, Part, StepPart, TextPart
from gateway.streams.stream import OpenStream
from schemas.websocket import (
    Accepted,
    ChoiceDone,
    Done,
    Error,
    Queued,
    ServerMessage,
    Started,
    ToolArguments,
    ToolCallStarted,
    ToolStep,
)

_encode = msgspec.json.encode


def encode_message(message: ServerMessage) -> bytes:
    return _encode(message)


class Generation:
    """What a client calls ``id``. ``response`` is set once it was accepted; a client that cancels
    before that has ``cancelled`` set. ``is_plain``: one choice, of which only text is told."""

    def __init__(self, generation_id: str, request_id: str) -> None:
        self.id = generation_id
        self.request_id = request_id
        self.response: ResponseStream | None = None
        self.trace: RequestTrace | None = None
        self.cancelled = False
        self.is_concluding = False
        self.is_plain = False
        self._queued: object = None
        self._started: object = None
        self._delta_head = b""

    def accept(self, response: ResponseStream) -> None:
        """It is stored; its request id is the answer's."""
        self.response = response
        self.request_id = response.request_id
        self.is_plain = len(response.choices) == 1 and response.request.sampling.logprobs is None
        names = _encode({"id": self.id, "request_id": self.request_id})
        self._delta_head = b'{"type":"delta",%b,"index":' % names[1:-1]

    def accepted(self, response: ResponseStream) -> Accepted:
        """The first message of an answer."""
        return Accepted(
            id=self.id,
            request_id=response.request_id,
            session=response.session,
            model=response.request.model,
            route_reason=response.request.route_reason,
        )

    def notes_of(self, stream: OpenStream, payloads: list[bytes]) -> None:
        """Append what there is to say about the first choice's way to a worker."""
        reader = stream.reader
        if reader.queued is not self._queued and reader.queued is not None:
            self._queued = reader.queued
            payloads.append(
                encode_message(
                    Queued(
                        id=self.id,
                        request_id=self.request_id,
                        position=reader.queued.position,
                        eta_s=reader.queued.eta_s,
                    )
                )
            )
        if reader.started is not self._started and reader.started is not None:
            self._started = reader.started
            payloads.append(
                encode_message(
                    Started(
                        id=self.id,
                        request_id=self.request_id,
                        prompt_tokens=reader.started.num_prompt_tokens,
                        cached_tokens=reader.started.num_cached_tokens,
                    )
                )
            )

    def say_plain(self, progress: Progress) -> bytes:
        """The delta of a choice that is alone and has nothing but text."""
        assert self.response is not None
        return b'%b%d,"num_tokens":%d,"text":%b}' % (
            self._delta_head,
            self.response.choices[0].next_index - progress.num_tokens,
            progress.num_tokens,
            _encode(progress.text),
        )

    def say(self, part: Part) -> bytes:
        """The message for a part; empty for one that needs none."""
        if type(part) is TextPart:
            return self._delta(part)
        names = {"id": self.id, "request_id": self.request_id}
        match part:
            case CallStart():
                return encode_message(
                    ToolCallStarted(
                        **names,
                        choice=part.choice,
                        call=part.call,
                        call_id=part.call_id,
                        name=part.name,
                    )
                )
            case CallArguments():
                return encode_message(
                    ToolArguments(**names, choice=part.choice, call=part.call, text=part.text)
                )
            case StepPart():
                return encode_message(
                    ToolStep(
                        **names,
                        call_id=part.call_id,
                        name=part.name,
                        arguments=part.arguments,
                        ok=part.ok,
                        output=part.output,
                        duration_ms=part.duration_ms,
                    )
                )
            case ChoiceEnd():
                assert self.response is not None
                if len(self.response.choices) == 1:
                    return b""
                return encode_message(
                    ChoiceDone(**names, choice=part.choice, finish_reason=part.reason)
                )
        return b""

    def end(self, response: ResponseStream) -> ServerMessage:
        """The last message of an answer that has ended."""
        refusal = response.refusal
        if refusal is not None and not (response.was_cancelled and refusal.code == "cancelled"):
            return self.refuse(refusal)
        usage = response.usage
        return Done(
            id=self.id,
            request_id=self.request_id,
            finish_reason=response.choices[0].reason if refusal is None else "cancelled",
            usage=usage_info(usage) if refusal is None or usage.prompt_tokens else None,
        )

    def refuse(self, refusal: Refusal) -> Error:
        return Error(
            id=self.id,
            request_id=self.request_id if self.response is not None else None,
            code=refusal.code,
            message=refusal.message,
            param=refusal.param,
            retry_after_s=refusal.retry_after_s,
        )

    def _delta(self, part: TextPart) -> bytes:
        payload = b'%b%d,"num_tokens":%d,"text":%b' % (
            self._delta_head,
            part.first_index,
            part.num_tokens,
            _encode(part.text),
        )
        if part.choice:
            payload += b',"choice":%d' % part.choice
        if part.logprobs:
            assert self.response is not None
            infos = logprob_infos(self.response.model.tokenizer, part.logprobs)
            payload += b',"logprobs":' + _encode(infos)
        return payload + b"}"
