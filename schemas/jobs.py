"""Jobs, and the results of asynchronous jobs."""

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
# Neither a model nor an adapter may have these names: "auto" is the scheduler's choice, the others
# are steps in a URL path.
RESERVED_NAMES = frozenset({PUBLIC_MODEL_AUTO, ".", ".."})

# Limit of names that become tokens of a subject: two encoded names must fit the server's protocol
# line.
MAX_NAME_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 256
MAX_TIME_NS = 2**63 - 1
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
_NAMES = ("request_id", "reply", "tenant")
_LABELS = (
    *("model", "model_requested", "route_reason", "user", "session_id", "traceparent"),
    *("cache_salt", "key_id", "adapter", "adapter_version"),
)
# OpenAI's limits of ``metadata``.
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
    """Interface through which a request came."""

    HTTP = "http"
    WEBSOCKET = "websocket"
    NATS = "nats"
    BENCH = "bench"


# Sources of requests that a gateway accepted.
GATEWAY_SOURCES = (Source.HTTP, Source.WEBSOCKET)


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Turn of a conversation. ``tool_calls`` and ``reasoning`` (the thoughts before the content)
    belong to assistant turns; a turn of the role ``tool`` is the result of the call
    ``tool_call_id``. The content of both may be null, which is empty text.

    Raises ValueError for null content of another role.
    """

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
    """Data to tell content, thoughts and calls of an answer apart. ``tools`` are the tools that the
    model sees; without tools, no text is a call. The input of ``freeform`` tools is text.
    ``must_call``: the answer must be tool calls. ``is_unheld``: no grammar constrains the calls, so
    calls of strict tools are checked once they are complete. Thoughts are returned if
    ``include_reasoning``."""

    tools: tuple[ToolDefinition, ...] = ()
    freeform: tuple[str, ...] = ()
    must_call: bool = False
    is_unheld: bool = False
    include_reasoning: bool = True


class RequestPart(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Place of a job among the generations of an accepted request, if the request may have several.

    ``request_id`` is the accepted request's. ``choice`` counts its choices, or the inputs to embed
    or to score, and ``round`` the rounds of server tools of a choice, both from 0. ``attempt``
    counts the re-queues of a batch's line. With ``shares_prompt``, another choice pays for the
    prompt: this job counts and costs its completion alone.
    """

    request_id: str
    choice: int = 0
    round: int = 0
    attempt: int = 0
    shares_prompt: bool = False


class Job(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Request for one generation, waiting in ``jobs.<model>.<tier>.<tenant>``.

    Exactly one of ``prompt``, ``messages``, ``prompt_token_ids`` and ``body`` is the input. The
    gateway always sends token ids; other services may leave tokenising to the scheduler. ``body``
    is the body of a chat or completion, in JSON or MessagePack, that a service has published
    together with a job's fields; the scheduler parses it. ``answer`` is set if the answer is told
    apart, as for a chat. Services never write ``body``, ``answer`` or ``asked``.

    ``request_id`` is the key of everything else and an idempotency key: publishing the same id
    twice is accepted once. ``reply`` names the stream ``tok.<reply>.<request_id>`` for frames: the
    tenant's name, alone or followed by a slash and a name of one's choice; empty: no listener.
    ``batch_frames``: the listener also reads envelopes (see ``schemas.frames.FrameBatch``).
    ``frames_as_json``: frames are JSON, as they are for every job published as JSON.
    ``store_result`` keeps the final result for 24 h.

    ``tools`` are described to the model together with ``messages``. ``chat_template_kwargs`` are
    further variables of its chat template, such as ``enable_thinking``. The prompt ends with the
    start of an answer if ``add_generation_prompt``; with ``continue_final_message`` the completion
    continues the last message, which must be the assistant's. ``truncate_prompt_tokens`` keeps the
    last tokens of the prompt (-1: as many as fit). ``pooling`` asks for the prompt's embedding, or
    for the numbers of a classifier's labels, instead of a completion; ``sampling`` has no effect
    then. A cross-encoder reads ``text_pair`` after ``prompt``. ``model`` "auto" lets the scheduler
    choose a model; ``model_requested`` is then the caller's value, and ``route_reason`` the reason
    for ``model``.

    ``received_ns`` is UTC epoch, fixed once by the process that received the request. An answer
    after ``deadline_ns`` is useless. ``traceparent`` continues the caller's distributed trace (W3C
    Trace Context). ``keep_transcript``: analytics may store the text of prompt and answer.
    ``key_id`` is the caller's API key and ``metadata`` the client's notes on the request; both are
    for its row in analytics only. Blocks of prompts in the prefix cache are shared only among
    requests with the same ``cache_salt``. A tenant's jobs with a lower ``priority`` are dispatched
    earlier, within limits on the wait of the others. ``prediction`` is the expected text or token
    ids of most of the completion: it changes no token and may save time. ``adapter`` is the name of
    a LoRA adapter of ``model``; ``adapter_version`` is its version at acceptance and stays to the
    job's end. ``notices`` name what the job's maker left out; the job's end repeats them. ``part``
    says which generation of an accepted request the job is; None: the only one. ``batch_id`` is the
    batch of which the job is a line. Services never write ``part`` or ``batch_id``. ``asked`` is
    the form of the request, for its record.

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
        # A job is copied several times on its way, so one comparison checks the lengths of most
        # names.
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
        """Upper bound of the tokens of its answers together; 0 for an embedding or if it is
        unknown."""
        if self.pooling is not None:
            return 0
        return (self.sampling.max_tokens or 0) * self.sampling.num_answers

    @property
    def shares_prompt(self) -> bool:
        """True if another choice of its request pays for the prompt."""
        return self.part is not None and self.part.shares_prompt

    @property
    def num_paid_prompt_tokens(self) -> int:
        """Number of its prompt's known tokens that count and cost."""
        return 0 if self.shares_prompt else len(self.prompt_token_ids or ())

    @property
    def awaits_client(self) -> bool:
        """True if its answer is useful only to a client of the gateway ``reply``: a gateway
        published the job and does not keep the result."""
        return self.source in GATEWAY_SOURCES and bool(self.reply) and not self.store_result

    @property
    def reservation_id(self) -> str:
        """Id of the gateway's reservation for this job. Jobs of a request share the request's id. A
        later round of tools and a later attempt at a batch's line have their own id."""
        part = self.part
        if part is None or part.round:
            return self.request_id
        return part.request_id + (f"-{part.attempt}" if part.attempt else "")

    def is_past_deadline(self, now_ns: int) -> bool:
        """Return whether the job's deadline has passed."""
        return self.deadline_ns is not None and now_ns >= self.deadline_ns


def asked_of(job: Job) -> Asked:
    """Return the form of a job's request; derive it from the job's fields if it is not prepared
    yet."""
    if job.asked is not None:
        return job.asked
    if job.source in GATEWAY_SOURCES:
        return Asked()
    return Asked(api=Api.JOB, stream=bool(job.reply), max_tokens=job.sampling.max_tokens)


def check_priority(priority: int) -> None:
    """Raise ValueError for a priority out of range."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be between {MIN_PRIORITY} and {MAX_PRIORITY}")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise ValueError for metadata over OpenAI's limits: 16 pairs, keys of 64 and values of 512
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
    """Raise ValueError if a value is longer than the bus carries."""
    if len(value) > max_characters:
        raise ValueError(f"{name} must have at most {max_characters} characters")


class BeamResult(BeamEnd, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a beam search. ``token_ids`` are left out of a result that is too large."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Final result of an asynchronous job, on ``results.<tenant>.<request>`` for 24 h.

    ``text_ends[i]`` is the length of ``text`` after ``token_ids[i]``, so that a reader with the
    first few tokens can be given the rest. ``logprobs`` and ``prompt_logprobs`` (one entry per
    token of the prompt, None for the first) are present if requested. ``embedding`` holds
    little-endian float32 numbers, as pooled; labels are before any activation. ``beams`` are the
    answers of a beam search, the best first, in place of text and tokens.

    The answer to a job with a chat body is told apart: ``text`` is its content, ``reasoning`` its
    thoughts, ``tool_calls`` its calls; ``reasoning_ends`` and, for each call, ``tool_call_ends``
    are the counterparts of ``text_ends``. ``error_param`` is the field at fault, if any.
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
        """True if the message was refused because it is not a valid job: its request id is free."""
        return self.error_code in _CODES_OF_NO_JOB


class DeadJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Dead letter: a failed job with the reason. ``payload`` is the message as published, or the
    prepared job, in the encoding ``content_type``. The dead letter itself has the same encoding."""

    reason: str
    message: str
    subject: str
    payload: bytes
    content_type: str = "application/msgpack"
    request_id: str = ""
    num_deliveries: int = 0
    died_ns: int = 0
