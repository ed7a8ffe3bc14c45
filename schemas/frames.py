"""Frames of a request's stream.

``Accepted -> Queued -> Started -> PromptLogprobs* -> Delta* -> Usage -> Done``, or one of ``Shed``,
``Cancelled``, ``Expired``, ``Failed``. An ``Embedding`` or the ``Beam`` frames of a beam search
take the place of Deltas. Every request ends in exactly one terminal frame. A reader keeps the
highest epoch it has seen, drops frames of a lower epoch, drops token indices that it has, and asks
for a replay when it sees a gap.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices


class FinishReason(StrEnum):
    """Reason of a successful end. Engines report STOP and LENGTH. TOOL_CALLS replaces STOP for an
    answer with tool calls that is told apart."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Token with its natural-log probability and the most likely alternatives as (id, logprob).
    ``rank`` is 1 plus the number of likelier tokens; 0: not counted."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class _Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    epoch: int = 0


class Accepted(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """Notice that the job is stored and will be answered."""


class Queued(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="queued"):
    """Position of a waiting job. ``position`` counts from 0; ``eta_s`` estimates the remaining
    wait."""

    position: int
    eta_s: float | None = None


class Started(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """Notice that a worker runs the job. An epoch above the last one: another worker continues
    it."""

    worker_id: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Next piece of a call's arguments, which are JSON when complete; ``name`` comes first."""

    arguments: str
    name: str = ""


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Next piece of the text input of a custom tool; ``name`` comes first."""

    input: str
    name: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Next piece of the call ``index`` of an answer, in the format of chat completions: id, type
    and name come with its first token."""

    index: int
    id: str = ""
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET


class Delta(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="delta"):
    """New tokens from ``index`` (of the first token) on, and the text that they add.

    ``text_ends[i]`` is the length of ``text`` after ``token_ids[i]``, so that a reader that already
    has the first few tokens can cut exactly; it is empty for a single token.

    The answer to a job with a chat body is told apart: ``text`` is content alone, ``reasoning`` the
    thoughts, and ``tool_calls`` the calls. ``reasoning_ends`` and, for each call,
    ``tool_call_ends`` are the counterparts of ``text_ends``.
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
    """Log-probabilities of the prompt from token ``index`` on, one entry per token, None for the
    first token. All of them come before the first Delta."""

    index: int = 0
    logprobs: tuple[TokenLogprob | None, ...]


class Embedding(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="embedding"):
    """Embedding of the prompt, as pooled, or the numbers of its labels, in little-endian float32;
    in place of Deltas."""

    values: bytes


class Beam(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="beam"):
    """Tokens of one answer of a beam search from ``index`` on, and the text that they add; in place
    of Deltas. ``beam`` 0 is the best answer. Beams come at the end; readers drop those of a lower
    epoch."""

    beam: int
    index: int = 0
    token_ids: tuple[int, ...]
    text: str = ""


class BeamEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End of one answer of a beam search: its stop token, if any, and the sum of the natural-log
    probabilities of its tokens."""

    num_tokens: int
    finish_reason: FinishReason
    stop_reason: int | None = None
    cumulative_logprob: float = 0.0


class Usage(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="usage"):
    """Token counts of the worker, the only part that counts tokens. ``reasoning_tokens`` are the
    completion's tokens of thoughts, with their markers. ``accepted_tokens`` of the
    ``proposed_tokens`` (speculative decoding) were accepted; both are of the attempt that ended the
    request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Done(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    """Successful end of a generation. ``num_tokens``, the number of prompt log-probabilities and
    the size of the embedding let a reader check that it has everything. ``stop_reason`` is the stop
    string or the id of the stop token that ended it, if any. ``beams`` are the answers of a beam
    search, the best first; the reasons are those of the best answer. ``notices`` name the parts
    that the answer leaves out."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_tokens: int
    num_prompt_logprobs: int = 0
    embedding_bytes: int = 0
    beams: tuple[BeamEnd, ...] = ()
    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())


class Cancelled(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="cancelled"):
    """End by cancellation: by the owner, or with the reason ``orphaned`` because its gateway was
    gone and its client did not return."""

    num_tokens: int = 0
    reason: str = ""


class Expired(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="expired"):
    """End because the deadline passed."""

    num_tokens: int = 0


class Shed(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="shed"):
    """Refusal for overload, or for a limit of its tenant, which ``limit`` names as
    ``schemas.tenants.LimitSet`` does. Retry after ``retry_after_s``. ``code`` is stable; empty in
    frames of older versions."""

    retry_after_s: float
    code: str = ""
    limit: str = ""
    message: str = ""


class Failed(_Frame, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """End by an error. ``retryable``: a new request may succeed. ``param`` is the field at fault,
    if any."""

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
    """Frame with the request that it belongs to."""

    request_id: str
    frame: Frame


class FrameBatch(msgspec.Struct, frozen=True, array_like=True):
    """Frames of many requests for one listener in one message: the output of one engine step."""

    frames: tuple[Addressed, ...]
