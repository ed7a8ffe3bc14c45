"""How a request was asked, for its row in analytics."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Api(StrEnum):
    """The interface that a request was written for. UNKNOWN is that of a record of a version that
    did not note it, JOB a job that a service published, GATEWAY a generation of the gateway's own,
    such as the summary of a session."""

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
        """The route of an API that answers with generations; the name of another API."""
        return _PATHS.get(self, self.value)


_PATHS = {
    Api.CHAT: "/v1/chat/completions",
    Api.COMPLETIONS: "/v1/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.WEBSOCKET: "/v1/ws",
}


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request was asked; only its record reads it.

    ``stream``: its client reads tokens as they come. ``max_tokens`` is what its caller wrote, or
    the default of its API; None: neither. ``reads_calls``: a part that reads the answer tells tool
    calls from text, so its record does the same; ``must_call``: the answer is held to calls.
    """

    api: Api = Api.UNKNOWN
    stream: bool = False
    max_tokens: int | None = None
    reads_calls: bool = False
    must_call: bool = False
