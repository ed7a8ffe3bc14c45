"""What enters the system, and what an asynchronous caller gets back."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millrace.schemas.chat.asked import Api, Asked
from millrace.schemas.chat.messages import MessageToolCall
from millrace.schemas.errors import (
    ForeignReplyError,
    ForeignTenantError,
    MalformedMessageError,
)
from millrace.schemas.frames import BeamEnd, FinishReason, TokenLogprob, Usage
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolCall, ToolDefinition

if TYPE_CHECKING:
    _Text = str
else:
    _Text = str | None  # null is read as no text

PUBLIC_MODEL_AUTO = "auto"
# No model and no adapter has these: the scheduler's choice, and steps in the path of an address.
RESERVED_NAMES = frozenset({PUBLIC_MODEL_AUTO, ".", ".."})

# Names that become tokens of a subject: two of them, encoded, must fit the server's protocol line.
MAX_NAME_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 256
MAX_TIME_NS = 2**63 - 1
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
_NAMES = ("request_id", "reply", "tenant")
_LABELS = (
    *("model", "model_requested", "route_reason", "user", "session_id", "traceparent"),
    *("cache_salt", "key_id", "adapter", "adapter_version"),
)
# OpenAI's bounds of ``metadata``.
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512
_CODES_OF_NO_JOB = frozenset(
    error.code for error in (MalformedMessageError, ForeignTenantError, ForeignReplyError)
)
_NAMES_OF, _LABELS_OF = attrgetter(*_NAMES), attrgetter(*_LABELS)


class Tier(StrEnum):
    """Service tiers, from the most to the least urgent."""

    ENTERPRISE = "enterprise"
    PRO = "pro"
    FREE = "free"
    BATCH = "batch"


class Source(StrEnum):
    """The interface through which a request came."""

    HTTP = "http"
    WEBSOCKET = "websocket"
    NATS = "nats"
    BENCH = "bench"


# Of requests that a gateway accepted.
GATEWAY_SOURCES = (Source.HTTP, Source.WEBSOCKET)


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a conversation. ``tool_calls`` are an assistant's, and so is ``reasoning``, the
    thoughts before its content; a turn of the role ``tool`` is the result of the call
    ``tool_call_id``. The content of both may be null, which is no text.

    Raises ValueError for null content of another role."""

    role: str
    content: _Text
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def __post_init__(self) -> None:
        if cast("str | None", self.content) is None:
            if self.role not in ("assistant", "tool"):
                raise ValueError(f"content of the role {self.role!r:.100} must be text")
            msgspec.structs.force_setattr(self, "content", "")


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is needed to tell content, thoughts and calls of an answer apart. ``tools`` are those
    that the model was told of; without any, no text is a call. The input of ``freeform`` tools is
    text. ``must_call``: the answer is held to calls. ``is_unheld``: no grammar holds the calls, so
    the calls of strict tools are checked once they have come. Thoughts are told if
    ``include_reasoning``."""

    tools: tuple[ToolDefinition, ...] = ()
    freeform: tuple[str, ...] = ()
    must_call: bool = False
    is_unheld: bool = False
    include_reasoning: bool = True


class RequestPart(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Which generation of an accepted request a job is, if the request may have several.

    ``request_id`` is the accepted request's. ``choice`` counts its choices, or the inputs to embed
    or to score, and ``round`` the rounds of server tools of a choice, both from 0. ``attempt``
    counts how often the line of a batch was queued again. With ``shares_prompt`` another choice
    pays for the prompt: this one counts and costs its completion alone.
    """

    request_id: str
    choice: int = 0
    round: int = 0
    attempt: int = 0
    shares_prompt: bool = False


class Job(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One request for one generation, as it waits in ``jobs.<model>.<tier>.<tenant>``.

    Exactly one of ``prompt``, ``messages``, ``prompt_token_ids`` and ``body`` says what to
    continue; the gateway always sends token ids, other services may leave tokenising to the
    scheduler.
    ``body`` is the body of a chat or completion, in JSON or MessagePack, that a service has
    published with the fields of a job beside its own: the scheduler reads it. ``answer`` says that
    the answer is told apart, as that of a chat is. No service writes these two, or ``asked``.
    ``request_id`` is the identity that everything else is keyed by: publishing the same id twice is
    accepted once. ``reply`` names the stream ``tok.<reply>.<request_id>`` that frames go to: the
    tenant's name, alone or followed by a slash and a name of one's choice; empty means that there
    is no listener. ``batch_frames``: the listener also reads envelopes (see
    ``schemas.frames.FrameBatch``); ``frames_as_json``: it wants JSON, which is also what a job that
    came in as JSON gets. ``store_result`` keeps the final result for 24 h. ``tools`` are described
    to the model with ``messages``; ``chat_template_kwargs`` are further variables of its chat
    template, such as ``enable_thinking``, and what begins an answer is in its prompt if
    ``add_generation_prompt``; with ``continue_final_message`` the completion goes on with the last
    message, which is the assistant's. Of its prompt the last ``truncate_prompt_tokens`` are kept
    (-1: as many as there is room for). ``pooling`` asks for the prompt's embedding instead of a
    completion, or for the numbers of a classifier's labels; nothing of ``sampling`` has a meaning
    then. A cross-encoder reads ``text_pair`` behind ``prompt``. ``model`` "auto" lets the scheduler
    choose one; ``model_requested`` is what the caller asked for then, and ``route_reason`` why it
    got ``model``. ``received_ns`` is UTC epoch, fixed once by the process that received the
    request; ``deadline_ns`` is when an answer is of no use any more. ``traceparent`` continues the
    caller's distributed trace (W3C Trace Context). ``keep_transcript``: analytics may have the
    words of prompt and answer. ``key_id`` is the API key that asked, ``metadata`` what its client
    noted on the request: both are for its row in analytics, and nothing else reads them. Blocks of
    prompts in the prefix cache are shared among requests with the same ``cache_salt`` only. Of the
    jobs of a tenant those with a lower ``priority`` are sent earlier, as far as none waits too long
    for it. ``prediction`` is what the completion will be for the most part, in text or token ids:
    it changes no token, and may save time. ``adapter`` is a LoRA adapter of ``model`` to apply, by
    its name; ``adapter_version`` is what it was when the request was accepted, and stays to its
    end. ``notices`` are what the part that made the job left out; its end repeats them. ``part``
    says which generation of an accepted request it is; None: the only one. ``batch_id`` is the
    batch that it is a line of. No service writes either of the two. ``asked`` is
    how it was asked, for its record; no service writes it.

    Raises ValueError, naming the field, for a value that cannot be carried to the end.
    """

    request_id: str
    model: str
    prompt: str | None = None
    text_pair: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    tools: tuple[ToolDefinition, ...] = ()
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    sampling: SamplingOptions = SamplingOptions()
    pooling: Pooling | None = None
    reply: str = ""
    batch_frames: bool = False
    frames_as_json: bool = False
    store_result: bool = False
    tenant: str = "local"
    user: str = ""
    session_id: str = ""
    tier: Tier = Tier.FREE
    source: Source = Source.NATS
    model_requested: str = ""
    route_reason: str = ""
    received_ns: int = 0
    deadline_ns: int | None = None
    traceparent: str = ""
    keep_transcript: bool = False
    cache_salt: str = ""
    priority: int = 0
    prediction: str | tuple[int, ...] = ""
    key_id: str = ""
    metadata: dict[str, str] = {}
    adapter: str = ""
    adapter_version: str = ""
    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())
    body: bytes = b""
    answer: AnswerForm | None = None
    asked: Asked | None = None
    part: RequestPart | None = None
    batch_id: str = ""

    def __post_init__(self) -> None:
        num_given = (
            (self.prompt is not None)
            + (self.messages is not None)
            + (self.prompt_token_ids is not None)
            + bool(self.body)
        )
        if num_given != 1:
            raise ValueError("give exactly one of prompt, messages and prompt_token_ids")
        if not self.request_id:
            raise ValueError(f"request_id must have 1 to {MAX_NAME_CHARACTERS} characters")
        # A job is copied several times on its way: one comparison for the lengths of most.
        names, labels = _NAMES_OF(self), _LABELS_OF(self)
        if max(map(len, names)) > MAX_NAME_CHARACTERS:
            for name, value in zip(_NAMES, names, strict=True):
                check_length(name, value, MAX_NAME_CHARACTERS)
        if max(map(len, labels)) > MAX_LABEL_CHARACTERS:
            for name, value in zip(_LABELS, labels, strict=True):
                check_length(name, value, MAX_LABEL_CHARACTERS)
        if not 0 <= self.received_ns <= MAX_TIME_NS:
            raise ValueError(f"received_ns must be between 0 and {MAX_TIME_NS}")
        if not 0 <= (self.deadline_ns or 0) <= MAX_TIME_NS:
            raise ValueError(f"deadline_ns must be between 0 and {MAX_TIME_NS}")
        check_priority(self.priority)
        if self.metadata:
            check_metadata(self.metadata)

    @property
    def max_completion_tokens(self) -> int:
        """The most that its answers may have together; an embedding has none. 0 if nobody knows."""
        if self.pooling is not None:
            return 0
        return (self.sampling.max_tokens or 0) * self.sampling.num_answers

    @property
    def shares_prompt(self) -> bool:
        """Whether another choice of its request pays for the prompt."""
        return self.part is not None and self.part.shares_prompt

    @property
    def num_paid_prompt_tokens(self) -> int:
        """How many tokens of its prompt, as far as it is known, count and cost."""
        return 0 if self.shares_prompt else len(self.prompt_token_ids or ())

    @property
    def awaits_client(self) -> bool:
        """Whether its answer is of use only to a client of the gateway ``reply``: a gateway
        published it, and does not keep the result for a later client."""
        return self.source in GATEWAY_SOURCES and bool(self.reply) and not self.store_result

    @property
    def reservation_id(self) -> str:
        """The id of the gateway's reservation for this job. The jobs of a request share the
        request's id. A later round of tools and a later attempt of a batch's line have an id of
        their own."""
        part = self.part
        if part is None or part.round:
            return self.request_id
        return part.request_id + (f"-{part.attempt}" if part.attempt else "")

    def is_past_deadline(self, now_ns: int) -> bool:
        """Whether nobody is to be given an answer any more."""
        return self.deadline_ns is not None and now_ns >= self.deadline_ns


def asked_of(job: Job) -> Asked:
    """How a job was asked, by its own fields if it is not prepared yet."""
    if job.asked is not None:
        return job.asked
    if job.source in GATEWAY_SOURCES:
        return Asked()
    return Asked(api=Api.JOB, stream=bool(job.reply), max_tokens=job.sampling.max_tokens)


def check_priority(priority: int) -> None:
    """Raises ValueError for one that no job can have."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be between {MIN_PRIORITY} and {MAX_PRIORITY}")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises ValueError for more than OpenAI's API takes: 16 pairs, keys of 64 and values of 512
    characters."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise ValueError(f"metadata takes at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise ValueError(
                f"metadata takes keys of at most {MAX_METADATA_KEY_CHARACTERS} characters, got "
                f"one of {len(key)}"
            )
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise ValueError(
                f"metadata takes values of at most {MAX_METADATA_VALUE_CHARACTERS} characters, got "
                f"one of {len(value)} for {key!r}"
            )


def check_length(name: str, value: str, max_characters: int) -> None:
    """Raises ValueError if a name is longer than what the bus carries."""
    if len(value) > max_characters:
        raise ValueError(f"{name} must have at most {max_characters} characters")


class BeamResult(BeamEnd, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a beam search. ``token_ids`` are left out of a result that is too large."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The final result of an asynchronous job, on ``results.<tenant>.<request>`` for 24 h.

    ``text_ends[i]`` is the length of ``text`` after ``token_ids[i]``, so that a reader who has the
    first few tokens can be given the rest. ``logprobs`` and ``prompt_logprobs`` (one entry for each
    token of the prompt, None for its first) are there if they were asked for. ``embedding`` holds
    little-endian float32 numbers, as pooled; those of labels before any activation. ``beams`` are
    the answers of a beam search, the best first, in place of text and tokens.

    The answer to a job whose body is a chat body is told apart: ``text`` is its content,
    ``reasoning`` its thoughts, ``tool_calls`` its calls; ``reasoning_ends`` and, for each call,
    ``tool_call_ends`` are as ``text_ends``. ``error_param`` is the field at fault, if one is.
    """

    request_id: str
    tenant: str
    model: str
    status: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    embedding: bytes = b""
    beams: tuple[BeamResult, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error_code: str = ""
    error_message: str = ""
    error_param: str = ""
    done_ns: int = 0
    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())
    reasoning: str = ""
    reasoning_ends: tuple[int, ...] = ()
    tool_calls: tuple[MessageToolCall, ...] = ()
    tool_call_ends: tuple[tuple[int, ...], ...] = ()

    @property
    def is_of_no_job(self) -> bool:
        """Whether the message was refused because it is not a job: its request id is free."""
        return self.error_code in _CODES_OF_NO_JOB


class DeadJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter: a job that was given up, with the reason; ``payload`` is the message as it was
    published, or the job as it was made ready, in the encoding ``content_type``. The dead letter
    itself is written in that, too."""

    reason: str
    message: str
    subject: str
    payload: bytes
    content_type: str = "application/msgpack"
    request_id: str = ""
    num_deliveries: int = 0
    died_ns: int = 0
