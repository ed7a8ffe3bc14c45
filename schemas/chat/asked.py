"""Form of a request, for its row in analytics."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Api(StrEnum):
    """API of a request. UNKNOWN stands in records of versions that did not note the API. JOB is a
    job published by a service. GATEWAY is a generation of the gateway's own, such as the summary of
    a session."""

    UNKNOWN = ""
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    WEBSOCKET = "websocket"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    RERANK = "rerank"
    SCORE = "score"
    CLASSIFY = "classify"
    JOB = "job"
    GATEWAY = "gateway"

    @property
    def path(self) -> str:
        """Route of an API that answers with generations; the name of another API."""
        return _PATHS.get(self, self.value)


_PATHS = {
    Api.CHAT: "/v1/chat/completions",
    Api.COMPLETIONS: "/v1/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.WEBSOCKET: "/v1/ws",
}


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Form of a request, for its record only.

    ``stream``: the client reads tokens as they come. ``max_tokens`` is the caller's value or the
    default of its API; None: neither. ``reads_calls``: tool calls are parsed out of the answer's
    text, so the record does the same. ``must_call``: the answer must be tool calls.
    """

    api: Api = Api.UNKNOWN
    stream: bool = False
    max_tokens: int | None = None
    reads_calls: bool = False
    must_call: bool = False
