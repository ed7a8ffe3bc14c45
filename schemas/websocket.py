"""The messages of ``/v1/ws``, subprotocol ``millrace.v1``: JSON objects with a ``type``.

A client names its generations by an ``id`` of its own, unique among those that run on the socket.
Each ``generate`` and ``resume`` is answered by ``accepted``, any ``queued``, ``started``,
``delta``, ``tool_call``, ``tool_arguments``, ``tool_step`` and ``choice_done``, and one ``done``;
or by one ``error`` with its id, at any point, after which nothing follows for that id.

Where keys are demanded, the key comes in the header of the handshake or in a first message
``authenticate``. A socket that is lost is no end: its generations go on for a while, and any
gateway continues them after a ``resume`` with the ``request_id`` and the index of the first token
that the client has not got. ``going_away`` says that the gateway shuts down: connect again, then
resume.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.chat.messages import Message
from millrace.schemas.jobs import Tier
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.openai import ChatFields, LogprobInfo, StreamOptions, UsageInfo
from millrace.schemas.sessions import SessionInfo

SUBPROTOCOL = "millrace.v1"


class Generate(
    ChatFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="generate",
):
    """Start a generation from ``messages`` or ``prompt`` (text or token ids). Sent again with the
    same ``idempotency_key``, on any socket, it attaches to the answer that there is. Every field of
    a chat completion is known: ``stream`` and ``stream_options.include_usage`` change nothing,
    since an answer is always streamed and ``done`` always has the usage."""

    id: str
    idempotency_key: str = ""
    messages: tuple[Message, ...] | None = None
    prompt: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class _ClientMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    pass


class Resume(_ClientMessage, frozen=True, kw_only=True, tag="resume"):
    """Go on with a request of an earlier socket under a new ``id``. ``next_index`` is the index of
    the first token that is missing, one for each choice if there are several."""

    id: str
    request_id: str
    next_index: int | tuple[int, ...] = 0


class Authenticate(_ClientMessage, frozen=True, kw_only=True, tag="authenticate"):
    """Answered by ``authenticated``, or by an error and the socket's end (1008)."""

    token: str


class CancelGeneration(_ClientMessage, frozen=True, kw_only=True, tag="cancel"):
    """Stop a generation; it ends in ``done`` with finish_reason ``cancelled``."""

    id: str


class Ping(_ClientMessage, frozen=True, tag="ping"):
    """Answered by ``pong``."""


ClientMessage = Generate | Resume | CancelGeneration | Authenticate | Ping


class _ServerMessage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"
):
    pass


class _OfGeneration(_ServerMessage, frozen=True, kw_only=True):
    """A message about the generation that the client named ``id``."""

    id: str
    request_id: str


class _Piece(_OfGeneration, frozen=True, kw_only=True):
    """Text of the tokens from ``index`` on."""

    index: int
    num_tokens: int
    text: str
    choice: int = 0
    logprobs: tuple[LogprobInfo, ...] = ()


class Authenticated(_ServerMessage, frozen=True, kw_only=True, tag="authenticated"):
    """The key is good."""

    tenant: str
    tier: Tier


class Accepted(_OfGeneration, frozen=True, kw_only=True, tag="accepted"):
    """The request is stored and will be answered, whatever dies. ``session`` says how the kept
    conversation was fitted into the context window. ``model`` answers; ``route_reason`` says why,
    if the choice was left to the gateway."""

    session: SessionInfo | None = None
    model: str = ""
    route_reason: str = ""


class Queued(_OfGeneration, frozen=True, kw_only=True, tag="queued"):
    """``position`` counts from 0; ``eta_s`` is a guess of the wait left."""

    position: int
    eta_s: float | None = None


class Started(_OfGeneration, frozen=True, kw_only=True, tag="started"):
    """A worker runs the request. A second one: another worker continues it."""

    prompt_tokens: int
    cached_tokens: int = 0


class Delta(_Piece, frozen=True, kw_only=True, tag="delta"):
    """``num_tokens`` more tokens of a choice from ``index`` on, and the text that they add. Tokens
    of tool calls count, but their text is in ``tool_call`` and ``tool_arguments``."""


class Reasoning(_Piece, frozen=True, kw_only=True, tag="reasoning"):
    """As a delta, of the thoughts that come before the answer."""


class ToolCallStarted(_OfGeneration, frozen=True, kw_only=True, tag="tool_call"):
    """The model calls a tool, the ``call``-th of this choice; its arguments follow, or the text
    that is the input of a ``custom`` tool."""

    call: int
    call_id: str
    name: str
    choice: int = 0
    custom: bool = False


class ToolArguments(_OfGeneration, frozen=True, kw_only=True, tag="tool_arguments"):
    """More of the arguments of a call, which are JSON when all are there, or of the text that is
    the input of a ``custom`` tool."""

    call: int
    text: str
    choice: int = 0
    custom: bool = False


class ToolStep(_OfGeneration, frozen=True, kw_only=True, tag="tool_step"):
    """The gateway has run one of its own tools; the model goes on with the result. ``output`` is
    what the tool returned, or the error that the model gets."""

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float


class ChoiceDone(_OfGeneration, frozen=True, kw_only=True, tag="choice_done"):
    """One of several choices has ended; ``done`` follows the last of them. ``stop_reason`` is the
    stop string or the id of the stop token that ended it, if one did."""

    choice: int
    finish_reason: str
    stop_reason: str | int | None = None


class Done(_OfGeneration, frozen=True, kw_only=True, tag="done"):
    """``finish_reason`` of the first choice: stop, length, tool_calls, cancelled; ``stop_reason``
    is the stop string or the id of the stop token that ended it, if one did. ``usage`` is of
    all choices; it is there unless it was cancelled. ``notices`` say what the answer leaves out."""

    finish_reason: str
    stop_reason: str | int | None = None
    usage: UsageInfo | None = None
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class Error(_ServerMessage, frozen=True, kw_only=True, tag="error"):
    """Without an ``id`` the message could not be assigned to a generation; the socket stays open in
    any case."""

    code: str
    message: str
    id: str | None = None
    request_id: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class Pong(_ServerMessage, frozen=True, kw_only=True, tag="pong"):
    pass


class GoingAway(_ServerMessage, frozen=True, kw_only=True, tag="going_away"):
    """This gateway shuts down; it closes the socket (1012) when its generations have ended or
    their time is over. Connect again, and resume what has not ended by then."""


ServerMessage = (
    Authenticated
    | Accepted
    | Queued
    | Started
    | Delta
    | Reasoning
    | ToolCallStarted
    | ToolArguments
    | ToolStep
    | ChoiceDone
    | Done
    | Error
    | Pong
    | GoingAway
)
