"""What streams back to the reader of a request.

``Accepted -> Queued -> Started -> PromptLogprobs* -> Delta* -> Usage -> Done``, or one of ``Shed``,
``Cancelled``, ``Expired``, ``Failed``; an ``Embedding`` takes the place of Deltas, and so do the
``Beam`` frames of a beam search. Every request ends in exactly one terminal frame. A reader keeps
the highest epoch it has seen, drops frames of an older one, drops token indices that it has and
asks for a replay when it sees a gap.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices


class FinishReason(StrEnum):
    """Why a generation ended well. Engines stop or reach a length; TOOL_CALLS is told of a stopped
    answer that is to be read apart and calls tools."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its natural-log probability, and the most likely alternatives as (id, logprob).
    ``rank`` is one more than how many tokens are likelier; 0: nobody counted them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class _Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    epoch: int = 0


class Accepted(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """The job is stored and will be answered."""


class Queued(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="queued"):
    """The job waits; ``position`` counts from 0, ``eta_s`` is a guess of the wait left."""

    position: int
    eta_s: float | None = None


class Started(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """A worker runs the job. A higher epoch than before: another worker continues it."""

    worker_id: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """More of the arguments of a call, which are JSON once all are there; ``name`` comes first."""

    arguments: str
    name: str = ""


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """More of the text that is the input of a custom tool; ``name`` comes first."""

    input: str
    name: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """More of the call ``index`` of an answer, as chat completions stream it: its id, type and name
    come with its first token."""

    index: int
    id: str = ""
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET


class Delta(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="delta"):
    """New tokens from ``index`` (of the first of them) on, and the text that they add.

    ``text_ends[i]`` is the length of ``text`` after ``token_ids[i]``, so that a reader which has
    the first few tokens can cut exactly; it is empty when there is one token.

    The answer to a job whose body is a chat body comes apart: ``text`` is content alone,
    ``reasoning`` the thoughts, and ``tool_calls`` the calls. ``reasoning_ends`` and, for each of
    the calls, ``tool_call_ends`` say of these texts what ``text_ends`` says of content.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    reasoning_ends: tuple[int, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tool_call_ends: tuple[tuple[int, ...], ...] = ()


class PromptLogprobs(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="prompt_logprobs"):
    """One entry for each token of the prompt from ``index`` on, None for its first; all of them
    come before the first Delta."""

    index: int = 0
    logprobs: tuple[TokenLogprob | None, ...]


class Embedding(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="embedding"):
    """The prompt's embedding as pooled, or the numbers of its labels, in little-endian float32; in
    place of Deltas."""

    values: bytes


class Beam(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="beam"):
    """Tokens of one answer of a beam search from ``index`` on, and the text that they add; in place
    of Deltas. ``beam`` 0 is the best answer. They come at the end; those of an older epoch are
    forgotten."""

    beam: int
    index: int = 0
    token_ids: tuple[int, ...]
    text: str = ""


class BeamEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an answer of a beam search ended, by what stop token if by one, and the sum of the
    natural-log probabilities of its tokens."""

    num_tokens: int
    finish_reason: FinishReason
    stop_reason: int | None = None
    cumulative_logprob: float = 0.0


class Usage(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="usage"):
    """Tokens as the worker counted them; no other part counts. ``reasoning_tokens`` are those of
    the completion that its thoughts took, with what marks them. Of ``proposed_tokens``, computed in
    case they should be the next, ``accepted_tokens`` were; both are of the attempt that ended it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Done(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    """The generation ended well. ``num_tokens`` lets a reader see that it has them all, and so do
    the number of prompt log-probabilities and the size of the embedding. ``stop_reason`` is the
    stop string or the id of the stop token that ended it, if one did. ``beams`` are the answers of
    a beam search, the best first; the reasons are those of the best answer. ``notices`` say what
    the answer leaves out."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_tokens: int
    num_prompt_logprobs: int = 0
    embedding_bytes: int = 0
    beams: tuple[BeamEnd, ...] = ()
    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())


class Cancelled(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="cancelled"):
    """Its owner cancelled it, or, with the reason ``orphaned``, its gateway was gone and no client
    came back for it."""

    num_tokens: int = 0
    reason: str = ""


class Expired(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="expired"):
    """The deadline passed."""

    num_tokens: int = 0


class Shed(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="shed"):
    """Refused for overload, or for a limit of its tenant, which ``limit`` names as
    ``schemas.tenants.LimitSet`` does; come back after ``retry_after_s``. ``code`` is stable; empty
    in frames of older versions."""

    retry_after_s: float
    code: str = ""
    limit: str = ""
    message: str = ""


class Failed(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """It cannot be answered; ``retryable`` says whether asking again may help. ``param`` is the
    field at fault, if one is."""

    code: str
    message: str
    retryable: bool = False
    param: str = ""


TerminalFrame = Done | Cancelled | Expired | Shed | Failed
Frame = (
    Accepted | Queued | Started | PromptLogprobs | Delta | Embedding | Beam | Usage | TerminalFrame
)
TERMINAL_FRAMES = get_args(TerminalFrame)


class Addressed(msgspec.Struct, frozen=True, array_like=True):
    """A frame and the request that it belongs to."""

    request_id: str
    frame: Frame


class FrameBatch(msgspec.Struct, frozen=True, array_like=True):
    """Frames of many requests for one listener in one message: what one engine step made."""

    frames: tuple[Addressed, ...]
