"""What analytics is made of. No prompt or completion text is in any of these but transcripts.

A batch of the sink holds tens of thousands of records, which no cycle can lead to: ``gc=False``
keeps them out of collections, which took over a quarter of the sink's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum

import msgspec

from millrace.schemas.chat.asked import Api
from millrace.schemas.engines import CostMethod, WorkerRole
from millrace.schemas.jobs import Source, Tier

# 1: until device time and its cost, earlier runs, stalls; 2: until key, metadata and energy; 3:
# until proposed tokens; 4: until pulled tokens; 5: until groups of devices; 6: until parts of
# requests. A field that is missing has its default.
RECORD_VERSION = 7

STALL_MS = 1_000.0
MAX_CALLED_TOOLS = 16
# OpenAI's bound of the name of a tool.
MAX_TOOL_NAME_CHARACTERS = 64


class Status(StrEnum):
    """How a request ended, one for each terminal frame."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SHED = "shed"
    FAILED = "failed"


class ClientEnd(StrEnum):
    """How a client parted from its stream, where that came before the stream's end."""

    DISCONNECTED = "disconnected"
    SLOW_CLIENT = "slow_client"
    GOING_AWAY = "going_away"  # the gateway, that is
    KEY_REVOKED = "key_revoked"
    REFUSED = "refused"  # another choice of the request could not be queued


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An earlier attempt at a request, which another one continued, as far as it is known: what one
    took of the device of a worker that was killed is unknown. Times are UTC epoch in ns;
    ``device_us`` and ``energy_j`` as in ``RequestRecord``. ``cached_tokens`` of those that it began
    with were in its worker's cache, ``pulled_tokens`` of which had come for it from the worker
    ``kv_source`` (empty: none had)."""

    epoch: int
    worker_id: str
    started_ns: int = 0
    ended_ns: int = 0
    device_us: int = 0
    energy_j: float | None = None
    cached_tokens: int = 0
    pulled_tokens: int = 0
    kv_source: str = ""


def sum_energy(parts: Iterable[float | None]) -> float | None:
    """Joules of several attempts; None unless there are some and each was measured."""
    known = list(parts)
    measured = [joules for joules in known if joules is not None]
    return sum(measured) if measured and len(measured) == len(known) else None


def sum_pulled(attempts: Iterable[Attempt]) -> tuple[int, str]:
    """Tokens that attempts, the first one first, pulled from other workers, all together, and where
    the last that came are from; empty if none did."""
    num_tokens, source = 0, ""
    for attempt in attempts:
        num_tokens += attempt.pulled_tokens
        source = attempt.kv_source or source
    return num_tokens, source


def fill_both_names(
    message: msgspec.Struct, attempts: tuple[Attempt, ...], lives: tuple[Attempt, ...]
) -> None:
    """Give a message its attempts under both names, whichever of them its writer knew."""
    if attempts != lives:
        msgspec.structs.force_setattr(message, "attempts", attempts or lives)
        msgspec.structs.force_setattr(message, "lives", attempts or lives)


class RequestRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="request"):
    """One finished generation: a request, or one of several that an accepted request has. Times are
    UTC epoch in ns, 0 where the request did not get so far.

    ``request_id`` is the generation's own. ``parent_id`` is the accepted request's if that may have
    several: a choice, an input, a round of server tools, an attempt at a line of a batch; empty:
    the generation is the request. ``choice``, ``round`` and ``attempt`` count from 0. The prompt
    that choices share counts once: ``prompt_tokens``, ``cached_tokens`` and the prompt's part of
    ``cost`` are 0 in all of them but the first, and so are those of a generation that no worker has
    begun, so that the generations of a request add up to what it used and pays. ``batch_id`` is the
    batch that it is a line of (empty: none).

    ``queue_ms`` is the queue time, from receipt to the engine's admission, ``ttft_ms`` from receipt
    to the first token, ``tpot_us`` the mean time per token after the first, ``cost`` what the
    tenant pays, in ``currency`` by the price book's ``price_version``. ``dispatched_ns`` is when
    the scheduler sent the request to the worker that ended it, ``attempts`` are the attempts before
    that. ``lives`` is the former name of ``attempts``: both are written and read in this version.

    ``device_us`` is the request's share of the time that the worker's device was busy, of all
    attempts together: each step is shared among its sequences by the work they did in it.
    ``device_cost`` is what that time costs us, in ``currency``, by the same price book.
    ``energy_j`` are the joules that came with that time, as a counter of the device counted them;
    None unless each attempt that ran was measured. ``key_id`` is the API key that asked (empty:
    none), ``metadata`` what its client noted on the request. ``cost_method`` says how ``device_us``
    is known. ``resampled``: it was continued, after a crash, by an engine that draws other tokens
    then than it would have, so its seed alone does not give this completion again. ``trace_id`` is
    that of its distributed trace, empty where none is recorded. Of ``proposed_tokens``, which were
    computed in case they should be the next, ``accepted_tokens`` were; both are of the attempt that
    ended it. ``pulled_tokens`` of what its attempts began with, prompt and tokens of earlier
    attempts, came from other workers' KV caches, all attempts together; the last that came were of
    ``kv_source``, empty if none did. ``num_devices`` is how many devices the worker that ended it
    computes on; ``device_us`` is of all of them together.

    ``finish_reason`` is the one that the client is told, in the words of chat completions.
    ``error_code`` is the code of the error that it is told: one of the failure, ``overloaded``,
    ``queue_full`` or the limit's where it was shed, ``deadline_exceeded`` where it expired,
    ``cancelled`` or ``orphaned`` where it was cancelled; empty where it is done. ``api`` is the
    interface that it was written for, ``stream`` whether its client read tokens as they came,
    ``max_tokens`` what it asked for (None: nothing), ``deadline_ns`` when its answer was of no use
    any more (0: never). Of the ``num_tool_calls`` that its answer made, ``called_tools`` names the
    first ``MAX_CALLED_TOOLS``, each cut to ``MAX_TOOL_NAME_CHARACTERS``: clients and models write
    these names.
    """

    request_id: str
    tenant: str
    user: str = ""
    session_id: str = ""
    source: Source = Source.NATS
    tier: Tier = Tier.FREE
    model_requested: str = ""
    model_served: str = ""
    route_reason: str = ""
    worker_id: str = ""
    adapter: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_us: float = 0.0
    total_ms: float = 0.0
    finish_reason: str = ""
    status: Status = Status.DONE
    error_code: str = ""
    cost: Decimal = Decimal(0)
    currency: str = "USD"
    price_version: str = ""
    received_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    done_ns: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    dispatched_ns: int = 0
    device_us: int = 0
    device_cost: Decimal = Decimal(0)
    attempts: tuple[Attempt, ...] = ()
    lives: tuple[Attempt, ...] = ()
    trace_id: str = ""
    cost_method: CostMethod = CostMethod.STEPS
    resampled: bool = False
    key_id: str = ""
    metadata: dict[str, str] = {}
    energy_j: float | None = None
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    pulled_tokens: int = 0
    kv_source: str = ""
    num_devices: int = 1
    api: Api = Api.UNKNOWN
    stream: bool = False
    max_tokens: int | None = None
    deadline_ns: int = 0
    called_tools: tuple[str, ...] = ()
    num_tool_calls: int = 0
    parent_id: str = ""
    choice: int = 0
    round: int = 0
    attempt: int = 0
    batch_id: str = ""
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        fill_both_names(self, self.attempts, self.lives)


class DeliveryRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="delivery"):
    """What the client saw of a request, as the gateway that held the stream measured it.

    ``first_byte_ms`` is from receipt (``received_ns`` of the request's record) to when the gateway
    writes the first token, of an answer that is not streamed to when it has it. ``intake_ms`` is
    what came before that: from the end of the request's head, or a WebSocket's message, to receipt,
    in which the gateway checked the key, read the body and parsed it.
    A stall is a gap of ``STALL_MS`` or more between two deliveries of an answer's tokens;
    ``stalled_ms`` is all of them together, ``longest_gap_ms`` the longest gap, a stall or not.
    ``num_resumes`` counts a client's returns to its stream. ``outcome`` is a ``Status`` value, or
    one of ``ClientEnd``.
    """

    request_id: str
    gateway_id: str
    tenant: str
    source: Source
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    tokens_delivered: int = 0
    num_replays: int = 0
    num_epochs: int = 0
    outcome: str = ""
    done_ns: int = 0
    model: str = ""
    num_resumes: int = 0
    num_stalls: int = 0
    stalled_ms: float = 0.0
    longest_gap_ms: float = 0.0
    intake_ms: float = 0.0
    version: int = RECORD_VERSION


class WorkerSample(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="worker"):
    """A worker's state over one sampling period that ended at ``sampled_ns``.

    Each of its ``num_devices`` had ``period_ms``, of which they were busy for ``busy_us``, all of
    them together; of that requests were charged ``charged_us``. The rest of the time they were
    idle. Of ``energy_j``, which its counter counted over the period, requests were given
    ``charged_j``; both None where there is no counter. An hour of one device costs
    ``device_per_hour`` in ``currency``. ``device_share`` is the utilisation that the driver shows
    of the first, ``device_memory_bytes`` what is in use of its ``device_memory_total_bytes``;
    0 where there is no driver to ask, as on a CPU. Of ``prefix_query_tokens`` that were looked for
    in the prefix cache, ``prefix_hit_tokens`` were there. It is preferred for work of ``role``;
    ``pulled_tokens`` in whole blocks of the KV cache came from other workers, ``served_tokens``
    went to them.
    """

    worker_id: str
    name: str
    model: str
    sampled_ns: int
    period_ms: float
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    step_ms_mean: float = 0.0
    busy_share: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    queue_depth: int = 0
    busy_us: int = 0
    charged_us: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    device_name: str = ""
    device_share: float = 0.0
    device_memory_bytes: int = 0
    device_memory_total_bytes: int = 0
    device_per_hour: Decimal = Decimal(0)
    currency: str = "USD"
    energy_j: float | None = None
    charged_j: float | None = None
    role: WorkerRole = WorkerRole.BOTH
    pulled_tokens: int = 0
    served_tokens: int = 0
    num_devices: int = 1
    version: int = RECORD_VERSION


class TranscriptRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="transcript"):
    """What was asked and answered, word for word: only of tenants that asked for it to be kept, on
    a subject and in a topic and a table of its own."""

    request_id: str
    tenant: str
    model: str
    prompt: str
    completion: str
    done_ns: int = 0
    version: int = RECORD_VERSION


class RefusalRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="refusal"):
    """``count`` requests that one gateway refused for one reason between ``first_ns`` and
    ``last_ns``, UTC epoch: they never were jobs, so there is no other record of them.

    ``tenant`` and ``key_id`` are empty for an unknown caller. ``door`` is the requested route,
    ``status`` the HTTP status, or the one that would say the same on a WebSocket, ``code`` the
    error's, and ``limit`` the limit that was reached, if one was. ``request_ids`` are those of the
    first ``MAX_REFUSED_IDS`` of them that had one, ``request_id`` is the first of these. Nothing
    that a client wrote is in it. Of a flood of many kinds, those over a bound have the door
    ``OTHER_REFUSALS`` and the status 400, 500 or 0, for any.

    A record is known by ``gateway_id``, ``recorded_ns`` and ``number``.
    """

    gateway_id: str
    number: int
    recorded_ns: int
    tenant: str
    key_id: str
    door: str
    status: int
    code: str
    count: int
    limit: str = ""
    first_ns: int = 0
    last_ns: int = 0
    request_id: str = ""
    request_ids: tuple[str, ...] = ()
    version: int = RECORD_VERSION


# A kind of refusal is seldom met more often within the second of a record, so that nearly every
# refusal that somebody asks about is found by its id; a flood does not make the record longer.
MAX_REFUSED_IDS = 8
OTHER_REFUSALS = "others"
# ClickHouse's DateTime, which rows expire by, ends in 2106: what is later is a mistake.
MAX_RECORD_TIME_NS = ((1 << 32) - 1) * 1_000_000_000


class LossCause(StrEnum):
    """Why a worker, or its engine's process, was lost."""

    STOPPED = "stopped"
    SILENT = "silent"
    REPLACED = "replaced"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"


class LossObserver(StrEnum):
    """The part that saw a loss."""

    SCHEDULER = "scheduler"
    PROCESS_KEEPER = "process_keeper"
    WORKER = "worker"


class WorkerLossRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="worker_loss"):
    """A worker that was lost, as one part saw it: the same loss may have a record of each.

    A scheduler sees that a worker says goodbye (STOPPED), is silent, or has a successor of its name
    (REPLACED); ``lost_ns`` is the worker's last heartbeat then, and all schedulers record the same.
    The keeper of a local system's processes sees how the process ended: by a SIGNAL, with an EXIT
    code, or killed because memory was short; ``detail`` is the signal's name or the code. A worker
    sees the same of its engine's process, after which it starts another engine.
    ``num_requests`` ran or waited there, as far as its last heartbeat or the worker itself says.
    """

    worker_id: str
    name: str
    model: str
    lost_ns: int
    cause: LossCause
    observer: LossObserver
    detail: str = ""
    num_requests: int = 0
    version: int = RECORD_VERSION


Record = (
    RequestRecord
    | DeliveryRecord
    | WorkerSample
    | TranscriptRecord
    | RefusalRecord
    | WorkerLossRecord
)
