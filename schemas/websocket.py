"""The messages of ``/v1/ws``, subprotocol ``millrace.v1``: JSON objects with a ``type``.

A client names its generations by an ``id`` of its own, unique among those that run on the socket.
Each ``generate`` is answered by ``accepted``, any ``queued``, ``started`` and ``delta``, and one
``done``; or by one ``error`` with its id, at any point, after which nothing follows for that id.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.openai import ChatFields, Message, UsageInfo

SUBPROTOCOL = "millrace.v1"


class Generate(
    ChatFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="generate",
):
    """Start a generation from ``messages`` or ``prompt`` (text or token ids)."""

    id: str
    messages: tuple[Message, ...] | None = None
    prompt: Any = None


class CancelGeneration(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="cancel",
):
    """Stop a generation; it ends in ``done`` with finish_reason ``cancelled``."""

    id: str


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping", forbid_unknown_fields=True):
    """Answered by ``pong``."""


ClientMessage = Generate | CancelGeneration | Ping


class _ServerMessage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"
):
    pass


class Accepted(_ServerMessage, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """The request is stored and will be answered, whatever dies."""

    id: str
    request_id: str


class Queued(_ServerMessage, frozen=True, kw_only=True, omit_defaults=True, tag="queued"):
    """``position`` counts from 0; ``eta_s`` is a guess of the wait left."""

    id: str
    request_id: str
    position: int
    eta_s: float | None = None


class Started(_ServerMessage, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """A worker has it. A second one: another worker goes on with it."""

    id: str
    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0


class Delta(_ServerMessage, frozen=True, kw_only=True, tag="delta"):
    """``num_tokens`` more tokens from ``index`` on, and the text that they add."""

    id: str
    request_id: str
    index: int
    num_tokens: int
    text: str


class Done(_ServerMessage, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    """``finish_reason``: stop, length, cancelled. ``usage`` is there unless it was cancelled."""

    id: str
    request_id: str
    finish_reason: str
    usage: UsageInfo | None = None


class Error(_ServerMessage, frozen=True, kw_only=True, omit_defaults=True, tag="error"):
    """Without an ``id`` the message could not be told apart; the socket lives on in any case."""

    code: str
    message: str
    id: str | None = None
    request_id: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class Pong(_ServerMessage, frozen=True, kw_only=True, tag="pong"):
    pass


ServerMessage = Accepted | Queued | Started | Delta | Done | Error | Pong
