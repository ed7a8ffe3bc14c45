"""The bytes of an answer, and what answers of OpenAI's endpoints share: events, usage, heads."""

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
# A line for who reads ids: openai-py takes an empty line behind an id for an event without data.
SSE_COMMENT = b": keep-alive\n"
# For who cuts at empty lines, and would pass over what stands in one piece with a comment.
SSE_KEEP_ALIVE = SSE_COMMENT + b"\n"


class Renderer(Protocol):
    """The bytes of one answer. A streamed one is ``first``, ``part`` for each of its parts and then
    ``last`` or ``failed``; another one gets its parts by ``add`` and is ``whole`` at the end.

    ``plain``, if there is one, goes before and after the JSON of a text to make the event of a part
    of the only choice that has nothing but text.
    """

    plain: tuple[bytes, bytes] | None

    def first(self) -> bytes:
        """Events before any part; may be empty."""

    def part(self, part: Part) -> PartEvents:
        """Return the events of a part, also of a part that an earlier connection sent."""

    def last(self) -> bytes:
        """Events after the last part of an answer that ended well."""

    def failed(self, refusal: Refusal) -> bytes:
        """Events after the last part of an answer that failed on the way."""

    def add(self, part: Part) -> None: ...

    def whole(self) -> bytes:
        """The body of an answer that ended well."""

    @property
    def must_store(self) -> bool:
        """Whether ``store`` has something to keep."""

    async def store(self) -> None:
        """Keep what a later request may refer to; called once at a good end, before ``last`` and
        ``whole`` are sent."""


def usage_info(usage: Usage) -> UsageInfo:
    """Usage as OpenAI's clients read it."""
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
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


class ChunkRenderer:
    """Renders the answers of the endpoints that stream chunks: what all chunks of one answer begin
    and end with. ``_told`` has the ids of its tokens, if they are to be told."""

    def __init__(self, kind: str, response: ResponseReader, options: StreamOptions | None) -> None:
        self._response = response
        self._told = ToldTokens(response) if response.request.tells_token_ids else None
        self._with_usage = bool(options is not None and options.include_usage)
        # Whether the end of a chunk is not that of any other: it says what was used by then.
        self._is_continuous = bool(options is not None and options.continuous_usage_stats)
        head = {
            "id": response.request_id,
            "object": kind,
            "created": response.created_s,
            "model": response.request.model,
        }
        self._head = encode(head)[:-1]
        begin = b"data: " + self._head + b',"choices":[{"index":'
        # Up to and with the index of each choice; what else it has follows after a comma.
        self._befores = [begin + str(i).encode() for i in range(len(response.choices))]
        self._close = b'}],"usage":null}\n\n' if self._with_usage else b"}]}\n\n"

    def _after(self, choice: int) -> bytes:
        """The end of a chunk that has something of that choice."""
        if not self._is_continuous:
            return self._close
        usage = self._response.choices[choice].usage_so_far
        return b'}],"usage":' + encode(usage and usage_info(usage)) + b"}\n\n"

    def _end(self, end: ChoiceEnd) -> bytes:
        """The value of ``finish_reason`` in the last chunk of a choice, and what is behind it, with
        what the answer leaves out."""
        fields = encode(end.reason) + b',"stop_reason":' + encode(end.stop_reason)
        after, notices = self._after(end.choice), self._notices()
        return fields + (b"}]" + notices + after.removeprefix(b"}]") if notices else after)

    def _after_first(self, name: str, value: object) -> bytes:
        """The end of a chunk of the first choice that also has a field beside its choices."""
        field = f'}}],"{name}":'.encode() + encode(value)
        return field + self._after(0).removeprefix(b"}]")

    def _without_choices(self, name: str, value: object) -> bytes:
        """An event with a field beside an empty list of choices."""
        field = f',"choices":[],"{name}":'.encode()
        return sse_data(self._head + field + encode(value) + b"}")

    def _notices(self) -> bytes:
        """A comma and the field of the notices so far; empty without any."""
        notices = self._response.notices
        return b"," + encode({NOTICE_NAME: notices})[1:-1] if notices else b""

    def last(self) -> bytes:
        """The end of an answer that ended well, behind its usage if that was asked for."""
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
        """A session is stored by the answer; nothing else is kept."""
