"""Rendering of answers, and shared shapes of OpenAI's endpoints: events, usage, heads."""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import UNSET

from millrace.gateway.errors import Refusal
from millrace.gateway.rendering.tokens import ToldTokens
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import ChoiceEnd, Part, PartEvents
from millrace.schemas.frames import Usage
from millrace.schemas.notices import NOTICE_NAME
from millrace.schemas.openai import (
    CompletionTokensDetails,
    PromptTokensDetails,
    StreamOptions,
    UsageInfo,
)

encode = msgspec.json.encode
SSE_DONE = b"data: [DONE]\n\n"
# Keep-alive without an empty line, for streams with event ids: openai-py reads an empty line after
# an id as an event without data.
SSE_COMMENT = b": keep-alive\n"
# Keep-alive for clients that split at empty lines, and would skip data in one piece with a comment.
SSE_KEEP_ALIVE = SSE_COMMENT + b"\n"


class Renderer(Protocol):
    """Renderer of one answer. A streamed answer is ``first``, ``part`` for each of its parts and
    then ``last`` or ``failed``. A whole answer gets its parts by ``add`` and is ``whole`` at the
    end.

    ``plain``, if set, is the prefix and suffix around the JSON of a text that make the event of a
    text-only part of a sole choice.
    """

    plain: tuple[bytes, bytes] | None

    def first(self) -> bytes:
        """Return the events before any part; may be empty."""

    def part(self, part: Part) -> PartEvents:
        """Return the events of a part, also of a part that an earlier connection sent."""

    def last(self) -> bytes:
        """Return the events after the last part of a successful answer."""

    def failed(self, refusal: Refusal) -> bytes:
        """Return the events after the last part of an answer that failed midway."""

    def add(self, part: Part) -> None: ...

    def whole(self) -> bytes:
        """Return the body of a successful answer."""

    @property
    def must_store(self) -> bool:
        """Return whether ``store`` has something to store."""

    async def store(self) -> None:
        """Store state that a later request may refer to. Called once at a successful end, before
        ``last`` and ``whole`` are sent.
        """


def usage_info(usage: Usage) -> UsageInfo:
    """Return the usage in OpenAI's shape."""
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_tokens,
            rejected_prediction_tokens=usage.proposed_tokens - usage.accepted_tokens,
        )
        if usage.reasoning_tokens or usage.proposed_tokens
        else UNSET,
    )


def sse_data(payload: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + payload + b"\n\n"


class ChunkRenderer:
    """Renderer for endpoints that stream chunks, with the shared beginning and end of an answer's
    chunks. ``_told`` has the ids of its tokens, if the request asked for them.
    """

    def __init__(self, kind: str, response: ResponseReader, options: StreamOptions | None) -> None:
        self._response = response
        self._told = ToldTokens(response) if response.request.tells_token_ids else None
        self._with_usage = bool(options is not None and options.include_usage)
        # True if each chunk has its own end, with the usage so far.
        self._is_continuous = bool(options is not None and options.continuous_usage_stats)
        head = {
            "id": response.request_id,
            "object": kind,
            "created": response.created_s,
            "model": response.request.model,
        }
        self._head = encode(head)[:-1]
        begin = b"data: " + self._head + b',"choices":[{"index":'
        # Start of a chunk up to and including each choice's index; further fields follow after a
        # comma.
        self._befores = [begin + str(i).encode() for i in range(len(response.choices))]
        self._close = b'}],"usage":null}\n\n' if self._with_usage else b"}]}\n\n"

    def _after(self, choice: int) -> bytes:
        """Return the end of a chunk of that choice."""
        if not self._is_continuous:
            return self._close
        usage = self._response.choices[choice].usage_so_far
        return b'}],"usage":' + encode(usage and usage_info(usage)) + b"}\n\n"

    def _end(self, end: ChoiceEnd) -> bytes:
        """Return the value of ``finish_reason`` in the last chunk of a choice, and the fields after
        it.
        """
        fields = encode(end.reason) + b',"stop_reason":' + encode(end.stop_reason)
        after, notices = self._after(end.choice), self._notices()
        return fields + (b"}]" + notices + after.removeprefix(b"}]") if notices else after)

    def _after_first(self, name: str, value: object) -> bytes:
        """Return the end of a chunk of the first choice with an additional top-level field."""
        field = f'}}],"{name}":'.encode() + encode(value)
        return field + self._after(0).removeprefix(b"}]")

    def _without_choices(self, name: str, value: object) -> bytes:
        """Return an event with a field beside an empty list of choices."""
        field = f',"choices":[],"{name}":'.encode()
        return sse_data(self._head + field + encode(value) + b"}")

    def _notices(self) -> bytes:
        """Return a comma and the field of the notices so far; empty without any."""
        notices = self._response.notices
        return b"," + encode({NOTICE_NAME: notices})[1:-1] if notices else b""

    def last(self) -> bytes:
        """Return the end of a successful answer, after its usage if the request asked for it."""
        if not self._with_usage:
            return SSE_DONE
        usage = encode(usage_info(self._response.usage))
        fields = b',"choices":[],"usage":' + usage + self._notices()
        return sse_data(self._head + fields + b"}") + SSE_DONE

    def failed(self, refusal: Refusal) -> bytes:
        return sse_data(refusal.body) + SSE_DONE

    @property
    def must_store(self) -> bool:
        return False

    async def store(self) -> None:
        """Store nothing: a chat completion has no state beyond its session."""
