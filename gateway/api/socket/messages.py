"""Request on a socket, and its messages. A delta costs one concatenation."""

from __future__ import annotations

from typing import Any

from millrace.bus.frame_reader import Progress
from millrace.gateway.errors import Refusal
from millrace.gateway.rendering.rendering import encode, usage_info
from millrace.gateway.rendering.tokens import logprob_infos
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.request.tracing import RequestTrace
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    ReasoningPart,
    StepPart,
)
from millrace.gateway.streams.stream import OpenStream
from millrace.schemas.notices import field_of
from millrace.schemas.websocket import (
    Accepted,
    ChoiceDone,
    Done,
    Error,
    Queued,
    Reasoning,
    ServerMessage,
    Started,
    ToolArguments,
    ToolCallStarted,
    ToolStep,
)


class SocketRequest:
    """Request with the client's ``id``. ``response`` is set once it was accepted. ``cancelled`` is
    set if the client cancels before that. ``arrived_s`` (monotonic) is the arrival of its message.
    ``is_plain``: the response has one choice, and only its text is sent.
    """

    def __init__(self, client_request_id: str, request_id: str, arrived_s: float) -> None:
        self.id = client_request_id
        self.request_id = request_id
        self.arrived_s = arrived_s
        self.response: ResponseStream | None = None
        self.trace: RequestTrace | None = None
        self.cancelled = False
        self.is_concluding = False
        self.is_plain = False
        self._queued: object = None
        self._started: object = None
        self._delta_head = b""

    def accept(self, response: ResponseStream) -> None:
        """Attach the accepted response; its request id becomes the answer's."""
        self.response = response
        self.request_id = response.request_id
        self.is_plain = len(response.choices) == 1 and response.request.sampling.logprobs is None
        self._delta_head = b'{"type":"delta",%b,"index":' % encode(self._names)[1:-1]

    def accepted(self, response: ResponseStream) -> Accepted:
        """Return the first message of an answer."""
        return Accepted(
            **self._names,
            session=response.session,
            model=response.request.model,
            route_reason=response.request.route_reason,
        )

    def notes_of(self, stream: OpenStream, payloads: list[bytes]) -> None:
        """Append messages about the progress of the first choice's job."""
        queued, started = stream.reader.queued, stream.reader.started
        if queued is not None and queued is not self._queued:
            self._queued = queued
            said = Queued(**self._names, position=queued.position, eta_s=queued.eta_s)
            payloads.append(encode(said))
        if started is not None and started is not self._started:
            self._started = started
            told = Started(
                **self._names,
                prompt_tokens=started.num_prompt_tokens,
                cached_tokens=started.num_cached_tokens,
            )
            payloads.append(encode(told))

    def say_plain(self, progress: Progress) -> bytes:
        """Return the delta of a sole choice that has only text."""
        assert self.response is not None
        return b'%b%d,"num_tokens":%d,"text":%b}' % (
            self._delta_head,
            self.response.choices[0].next_index - progress.num_tokens,
            progress.num_tokens,
            encode(progress.text),
        )

    def say(self, part: Part) -> bytes:
        """Return the message for a part; empty if the part needs none."""
        if type(part) is AnswerText:
            return self._delta(part)
        match part:
            case ReasoningPart():
                return self._reasoning(part)
            case CallStart():
                return encode(ToolCallStarted(**self._names, **part._asdict()))
            case CallArguments():
                return encode(ToolArguments(**self._names, **part._asdict()))
            case StepPart():
                return encode(ToolStep(**self._names, **part.told()))
            case ChoiceEnd():
                assert self.response is not None
                if len(self.response.choices) > 1:
                    return encode(
                        ChoiceDone(
                            **self._names,
                            choice=part.choice,
                            finish_reason=part.reason,
                            stop_reason=part.stop_reason,
                        )
                    )
        return b""

    def end(self, response: ResponseStream) -> ServerMessage:
        """Return the last message of an ended answer."""
        refusal = response.refusal
        if refusal is not None and not (response.was_cancelled and refusal.code == "cancelled"):
            return self.refuse(refusal)
        usage, first = response.usage, response.choices[0]
        return Done(
            **self._names,
            finish_reason=first.reason if refusal is None else "cancelled",
            stop_reason=first.stop_reason if refusal is None else None,
            usage=usage_info(usage) if refusal is None or usage.prompt_tokens else None,
            notices=field_of(response.notices),
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

    @property
    def _names(self) -> dict[str, Any]:
        """Return the fields with which all its messages begin."""
        return {"id": self.id, "request_id": self.request_id}

    def _reasoning(self, part: ReasoningPart) -> bytes:
        """Return the message of a reasoning part. Unwanted thoughts are sent as tokens without
        text.
        """
        assert self.response is not None
        if not self.response.request.include_reasoning:
            return self._delta(AnswerText(*part)._replace(text="")) if part.num_tokens else b""
        tokenizer = self.response.model.tokenizer
        return encode(
            Reasoning(
                **self._names,
                index=part.first_index,
                num_tokens=part.num_tokens,
                text=part.text,
                choice=part.choice,
                logprobs=logprob_infos(tokenizer, part.logprobs),
            )
        )

    def _delta(self, part: AnswerText) -> bytes:
        payload = b'%b%d,"num_tokens":%d,"text":%b' % (
            self._delta_head,
            part.first_index,
            part.num_tokens,
            encode(part.text),
        )
        if part.choice:
            payload += b',"choice":%d' % part.choice
        if part.logprobs:
            assert self.response is not None
            infos = logprob_infos(self.response.model.tokenizer, part.logprobs)
            payload += b',"logprobs":' + encode(infos)
        return payload + b"}"
