"""Conversations that are kept between requests."""

from __future__ import annotations

import msgspec

from millrace.schemas.jobs import ChatMessage


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a kept conversation went into a request's context.

    ``version`` counts the changes of the session, ``num_messages`` those it held before this turn.
    To fit the context window, the oldest ``num_dropped`` of them were left out of the prompt, and
    ``num_summarised`` stand in it as one summary.
    """

    session_id: str
    version: int
    num_messages: int
    num_dropped: int = 0
    num_summarised: int = 0


class SessionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/sessions/{id}``: the turns from the oldest that is kept on.

    ``summary`` stands for the ``num_summarised`` messages that went before.
    """

    session_id: str
    version: int
    messages: tuple[ChatMessage, ...]
    summary: str = ""
    num_summarised: int = 0
    expires_in_s: float = 0.0
