"""Conversations that the server keeps between requests."""

from __future__ import annotations

import msgspec

from millrace.schemas.jobs import ChatMessage


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a kept conversation in a request's context.

    ``version`` counts the changes of the session, ``num_messages`` its messages before this turn.
    To fit the context window, the oldest ``num_dropped`` messages were left out of the prompt, and
    ``num_summarised`` appear in it as one summary.
    """

    session_id: str
    version: int
    num_messages: int
    num_dropped: int = 0
    num_summarised: int = 0


class SessionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/sessions/{id}``: the turns from the oldest kept turn on.

    ``summary`` stands for the ``num_summarised`` messages before them.
    """

    session_id: str
    version: int
    messages: tuple[ChatMessage, ...]
    summary: str = ""
    num_summarised: int = 0
    expires_in_s: float = 0.0
