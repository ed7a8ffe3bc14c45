"""Messages of ``/v1/ws``, subprotocol ``millrace.v1``: JSON objects with a ``type``.

A client names each generation by its own ``id``, unique among the running generations of the
socket. Each ``generate`` and ``resume`` is answered by ``accepted``, any ``queued``, ``started``,
``delta``, ``tool_call``, ``tool_arguments``, ``tool_step`` and ``choice_done``, and one ``done``.
It may be answered by one ``error`` with its id at any point, after which no message for that id
follows.

If keys are required, the key comes in the header of the handshake or in a first message
``authenticate``. A lost socket does not end its generations at once: they continue for a while, and
any gateway continues them after a ``resume`` with the ``request_id`` and the index of the client's
first missing token. ``going_away``: the gateway shuts down; connect again, then resume.
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
    """Command to start a generation from ``messages`` or ``prompt`` (text or token ids). A repeated
    command with the same ``idempotency_key``, on any socket, attaches to the existing answer. Every
    field of a chat completion is known: ``stream`` and ``stream_options.include_usage`` have no
    effect, since an answer is always streamed and ``done`` always has the usage."""

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
    """Command to continue a request of an earlier socket under a new ``id``. ``next_index`` is the
    index of the first missing token, one for each choice if there are several."""

    id: str
    request_id: str
    next_index: int | tuple[int, ...] = 0


class Authenticate(_ClientMessage, frozen=True, kw_only=True, tag="authenticate"):
    """Key of the client. The answer is ``authenticated``, or an error and the end of the socket
    with code 1008."""

    token: str


class CancelGeneration(_ClientMessage, frozen=True, kw_only=True, tag="cancel"):
    """Command to stop a generation; it ends in ``done`` with finish_reason ``cancelled``."""

    id: str


class Ping(_ClientMessage, frozen=True, tag="ping"):
    """Ping, answered by ``pong``."""


ClientMessage = Generate | Resume | CancelGeneration | Authenticate | Ping


class _ServerMessage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"
):
    pass


class _OfGeneration(_ServerMessage, frozen=True, kw_only=True):
    """Message about the generation that the client named ``id``."""

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
    """Notice that the key is valid."""

    tenant: str
    tier: Tier


class Accepted(_OfGeneration, frozen=True, kw_only=True, tag="accepted"):
    """Notice that the request is stored and will be answered, even after a crash. ``session`` says
    how the kept conversation was fitted into the context window. ``model`` answers;
    ``route_reason`` is the reason for that model, if the gateway chose it."""

    session: SessionInfo | None = None
    model: str = ""
    route_reason: str = ""


class Queued(_OfGeneration, frozen=True, kw_only=True, tag="queued"):
    """Position of a waiting request. ``position`` counts from 0; ``eta_s`` estimates the remaining
    wait."""

    position: int
    eta_s: float | None = None


class Started(_OfGeneration, frozen=True, kw_only=True, tag="started"):
    """Notice that a worker runs the request. A second notice: another worker continues it."""

    prompt_tokens: int
    cached_tokens: int = 0


class Delta(_Piece, frozen=True, kw_only=True, tag="delta"):
    """New tokens of a choice: ``num_tokens`` from ``index`` on, and the text that they add. Tokens
    of tool calls count, but their text is in ``tool_call`` and ``tool_arguments``."""


class Reasoning(_Piece, frozen=True, kw_only=True, tag="reasoning"):
    """Delta of the thoughts before the answer."""


class ToolCallStarted(_OfGeneration, frozen=True, kw_only=True, tag="tool_call"):
    """Start of a tool call, the ``call``-th of this choice; its arguments follow, or the text input
    of a ``custom`` tool."""

    call: int
    call_id: str
    name: str
    choice: int = 0
    custom: bool = False


class ToolArguments(_OfGeneration, frozen=True, kw_only=True, tag="tool_arguments"):
    """Next piece of a call's arguments, which are JSON when complete, or of the text input of a
    ``custom`` tool."""

    call: int
    text: str
    choice: int = 0
    custom: bool = False


class ToolStep(_OfGeneration, frozen=True, kw_only=True, tag="tool_step"):
    """Notice that the gateway has run one of its own tools; the model continues with the result.
    ``output`` is the tool's result, or the error that the model gets."""

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float


class ChoiceDone(_OfGeneration, frozen=True, kw_only=True, tag="choice_done"):
    """End of one of several choices; ``done`` follows the last of them. ``stop_reason`` is the stop
    string or the id of the stop token that ended it, if any."""

    choice: int
    finish_reason: str
    stop_reason: str | int | None = None


class Done(_OfGeneration, frozen=True, kw_only=True, tag="done"):
    """End of a generation. ``finish_reason`` is the first choice's: stop, length, tool_calls,
    cancelled. ``stop_reason`` is the stop string or the id of the stop token that ended it, if any.
    ``usage`` covers all choices; it is missing after a cancellation. ``notices`` name the parts
    that the answer leaves out."""

    finish_reason: str
    stop_reason: str | int | None = None
    usage: UsageInfo | None = None
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class Error(_ServerMessage, frozen=True, kw_only=True, tag="error"):
    """Error. Without an ``id``, the message could not be assigned to a generation; the socket stays
    open in any case."""

    code: str
    message: str
    id: str | None = None
    request_id: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class Pong(_ServerMessage, frozen=True, kw_only=True, tag="pong"):
    pass


class GoingAway(_ServerMessage, frozen=True, kw_only=True, tag="going_away"):
    """Notice that this gateway shuts down; it closes the socket (1012) when its generations have
    ended or the drain time is over. Connect again, and resume the unfinished generations."""


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
