"""What OpenAI's answers share: events, usage, and how a head is encoded once for many chunks."""

from __future__ import annotations

import msgspec

from gateway.errors import Refusal
from schemas.frames import Usage
from schemas.openai import PromptTokensDetails, UsageInfo

encode = msgspec.json.encode

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


def sse_failure(refusal: Refusal) -> bytes:
    """The end of a stream that failed on the way."""
    return sse_data(refusal.body) + SSE_DONE


class SseHead:
    """The beginning and the end that all chunks of one answer have."""

    def __init__(
        self, request_id: str, kind: str, created_s: int, model: str, *, with_usage: bool
    ) -> None:
        head = {"id": request_id, "object": kind, "created": created_s, "model": model}
        self._head = encode(head)[:-1]
        self._before = b"data: " + self._head + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"

    def before(self, choice: int) -> bytes:
        """Up to and with the index of the choice; what else it has follows after a comma."""
        return self._before + str(choice).encode()

    @property
    def after(self) -> bytes:
        return self._after

    def without_choices(self, name: str, value: object) -> bytes:
        """An event with a field beside an empty list of choices."""
        field = f',"choices":[],"{name}":'.encode()
        return sse_data(self._head + field + encode(value) + b"}")
