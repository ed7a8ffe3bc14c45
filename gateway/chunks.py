"""The bytes of OpenAI's answers. A chunk of text costs a concatenation, not an encoder's pass."""

from __future__ import annotations

from typing import Protocol

import msgspec

from schemas.frames import Usage
from schemas.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    UsageInfo,
)

_encode = msgspec.json.encode

SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": keep-alive\n\n"


def usage_info(usage: Usage) -> UsageInfo:
    """Usage as OpenAI's clients read it."""
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def sse_data(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


class Chunks(Protocol):
    """One response's events and body, for one of OpenAI's two endpoints."""

    def first(self) -> bytes:
        """What comes before any text; may be empty."""

    def text(self, text: str) -> bytes: ...

    def finish(self, reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


class _SseChunks:
    def __init__(self, kind: str, request_id: str, model: str, created_s: int, with_usage: bool):
        head = {"id": request_id, "object": kind, "created": created_s, "model": model}
        self._head = _encode(head)[:-1]
        self._prefix = b"data: " + self._head + b',"choices":[{"index":0,'
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return sse_data(self._head + b',"choices":[],"usage":' + _encode(usage_info(usage)) + b"}")


class ChatChunks(_SseChunks):
    """``chat.completion.chunk`` events and the ``chat.completion`` body."""

    def __init__(self, request_id: str, model: str, created_s: int, *, with_usage: bool) -> None:
        super().__init__("chat.completion.chunk", request_id, model, created_s, with_usage)
        self._request_id = request_id
        self._model = model
        self._created_s = created_s
        self._before = self._prefix + b'"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def first(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":""'
        return self._prefix + role + self._after

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def finish(self, reason: str) -> bytes:
        end = b'"delta":{},"logprobs":null,"finish_reason":' + _encode(reason) + b"}"
        return self._prefix + end + self._tail

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        choice = ChatChoice(message=AssistantMessage(content=text), finish_reason=reason)
        return _encode(
            ChatCompletion(
                id=self._request_id,
                created=self._created_s,
                model=self._model,
                choices=(choice,),
                usage=usage_info(usage),
            )
        )


class CompletionChunks(_SseChunks):
    """``text_completion`` events and body."""

    def __init__(self, request_id: str, model: str, created_s: int, *, with_usage: bool) -> None:
        super().__init__("text_completion", request_id, model, created_s, with_usage)
        self._request_id = request_id
        self._model = model
        self._created_s = created_s
        self._before = self._prefix + b'"text":'
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail

    def first(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def finish(self, reason: str) -> bytes:
        end = b'"","logprobs":null,"finish_reason":' + _encode(reason) + b"}"
        return self._before + end + self._tail

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        return _encode(
            Completion(
                id=self._request_id,
                created=self._created_s,
                model=self._model,
                choices=(CompletionChoice(text=text, finish_reason=reason),),
                usage=usage_info(usage),
            )
        )
