"""Records of analytics. Only transcripts contain the text of prompts and completions.

A batch of the sink holds tens of thousands of records without reference cycles: ``gc=False``
excludes them from garbage collection, which took over a quarter of the sink's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum

import msgspec

from millrace.schemas.chat.asked import Api
from millrace.schemas.engines import CostMethod, WorkerRole
from millrace.schemas.jobs import Source, Tier

# Last version without: 1: device time and its cost, earlier runs, stalls; 2: key, metadata and
# energy; 3: proposed tokens; 4: pulled tokens; 5: groups of devices; 6: parts of requests. A
# missing field has its default.
RECORD_VERSION = 7

STALL_MS = 1_000.0
MAX_CALLED_TOOLS = 16
# OpenAI's limit of a tool's name.
MAX_TOOL_NAME_CHARACTERS = 64


class Status(StrEnum):
    """Status of an ended request, one for each terminal frame."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SHED = "shed"
    FAILED = "failed"


class ClientEnd(StrEnum):
    """Reason for which a client left its stream before the stream's end."""

    DISCONNECTED = "disconnected"
    SLOW_CLIENT = "slow_client"
    GOING_AWAY = "going_away"  # the gateway shut down
    KEY_REVOKED = "key_revoked"
    REFUSED = "refused"  # another choice of the request could not be queued


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Earlier attempt at a request, which another attempt continued. Values are as far as known:
    the device time at a killed worker is unknown. Times are UTC epoch in ns; ``device_us`` and
    ``energy_j`` are as in ``RequestRecord``. ``cached_tokens`` of its initial tokens were in its
    worker's cache; ``pulled_tokens`` of them were pulled from the worker ``kv_source`` (empty:
    none)."""

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
    """Return the joules of several attempts; None if there are none or one was not measured."""
    known = list(parts)
    measured = [joules for joules in known if joules is not None]
    return sum(measured) if measured and len(measured) == len(known) else None


def sum_pulled(attempts: Iterable[Attempt]) -> tuple[int, str]:
    """Return the total of tokens pulled from other workers by attempts (the first one first), and
    the source of the latest pull; empty if there was none."""
    num_tokens, source = 0, ""
    for attempt in attempts:
        num_tokens += attempt.pulled_tokens
        source = attempt.kv_source or source
    return num_tokens, source


def fill_both_names(
    message: msgspec.Struct, attempts: tuple[Attempt, ...], lives: tuple[Attempt, ...]
) -> None:
    """Set both names of a message's attempts, from the name that its writer used."""
    if attempts != lives:
        msgspec.structs.force_setattr(message, "attempts", attempts or lives)
        msgspec.structs.force_setattr(message, "lives", attempts or lives)


class RequestRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="request"):
    """Finished generation: a request, or one of several generations of an accepted request. Times
    are UTC epoch in ns, 0 if the request did not get so far.

    ``request_id`` is the generation's own id. ``parent_id`` is the accepted request's id if that
    may have several generations: a choice, an input, a round of server tools, an attempt at a line
    of a batch; empty: the generation is the request. ``choice``, ``round`` and ``attempt`` count
    from 0. The prompt shared by choices counts once: ``prompt_tokens``, ``cached_tokens`` and the
    prompt's part of ``cost`` are 0 in all choices but the first, and in a generation that no worker
    has begun. So the generations of a request add up to its usage and cost. ``batch_id`` is the
    batch of which it is a line (empty: none).

    ``queue_ms`` is the queue time, from receipt to the engine's admission; ``ttft_ms`` is from
    receipt to the first token; ``tpot_us`` is the mean time per token after the first. ``cost`` is
    the tenant's price, in ``currency``, by the price book's ``price_version``. ``dispatched_ns`` is
    the time at which the scheduler sent the request to the worker that ended it; ``attempts`` are
    the earlier attempts. ``lives`` is the former name of ``attempts``: this version writes and
    reads both.

    ``device_us`` is the request's share of the worker's busy device time, over all attempts: each
    step is shared among its sequences by their work in it. ``device_cost`` is the operator's cost
    of that time, in ``currency``, by the same price book. ``energy_j`` are the joules of that time,
    from the device's counter; None unless each attempt that ran was measured. ``key_id`` is the
    caller's API key (empty: none), ``metadata`` the client's notes on the request. ``cost_method``
    is the method of measuring ``device_us``. ``resampled``: after a crash an engine continued it
    that draws other tokens, so its seed alone does not reproduce this completion. ``trace_id`` is
    the id of its distributed trace; empty: not recorded. ``accepted_tokens`` of the
    ``proposed_tokens`` (speculative decoding) were accepted; both are of the attempt that ended it.
    ``pulled_tokens`` of its attempts' initial tokens (prompt and tokens of earlier attempts) came
    from other workers' KV caches, over all attempts; ``kv_source`` is the source of the latest
    pull, empty if there was none. ``num_devices`` is the number of devices of the worker that ended
    it; ``device_us`` covers all of them together.

    ``finish_reason`` is the reason told to the client, in the words of chat completions.
    ``error_code`` is the error code told to the client: the failure's code; ``overloaded``,
    ``queue_full`` or the limit's code if it was shed; ``deadline_exceeded`` if it expired;
    ``cancelled`` or ``orphaned`` if it was cancelled; empty if it is done. ``api`` is the API of
    the request, ``stream`` whether its client read tokens as they came, ``max_tokens`` the
    requested length (None: not given), ``deadline_ns`` its deadline (0: none). ``called_tools``
    names the first ``MAX_CALLED_TOOLS`` of its ``num_tool_calls`` calls, each cut to
    ``MAX_TOOL_NAME_CHARACTERS``, since clients and models write these names.
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
    """Delivery of a request to its client, as measured by the gateway that held the stream.

    ``first_byte_ms`` is from receipt (``received_ns`` of the request's record) to the gateway's
    write of the first token, or of the whole answer if it is not streamed. ``intake_ms`` precedes
    it: from the end of the request's head, or a WebSocket's message, to receipt. In this time the
    gateway checked the key, read the body and parsed it. A stall is a gap of ``STALL_MS`` or more
    between two deliveries of an answer's tokens; ``stalled_ms`` is the sum of all stalls,
    ``longest_gap_ms`` the longest gap, a stall or not. ``num_resumes`` counts the client's
    reconnects to its stream. ``outcome`` is a ``Status`` value, or one of ``ClientEnd``.
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
    """State of a worker over one sampling period that ended at ``sampled_ns``.

    Each of its ``num_devices`` had ``period_ms``. Together they were busy for ``busy_us`` and idle
    for the rest; ``charged_us`` of the busy time was charged to requests. ``charged_j`` of the
    period's ``energy_j`` was charged to requests; both are None without an energy counter. An hour
    of one device costs ``device_per_hour`` in ``currency``. ``device_share`` is the driver's
    utilisation of the first device, and ``device_memory_bytes`` of ``device_memory_total_bytes``
    are in use; 0 without a driver, as on a CPU. ``prefix_hit_tokens`` of the
    ``prefix_query_tokens`` looked up in the prefix cache were found. ``role`` is the worker's
    preferred work. ``pulled_tokens``, in whole blocks of the KV cache, came from other workers;
    ``served_tokens`` went to them.
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
    """Transcript: the text of a prompt and its answer. It is recorded only for tenants that asked
    for it, on its own subject, topic and table."""

    request_id: str
    tenant: str
    model: str
    prompt: str
    completion: str
    done_ns: int = 0
    version: int = RECORD_VERSION


class RefusalRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="refusal"):
    """Count of requests that one gateway refused for one reason between ``first_ns`` and
    ``last_ns``, UTC epoch. They never became jobs, so there is no other record of them.

    ``tenant`` and ``key_id`` are empty for an unknown caller. ``door`` is the requested route,
    ``status`` the HTTP status or the equivalent on a WebSocket, ``code`` the error's code, and
    ``limit`` the limit that was reached, if any. ``request_ids`` are the ids of the first
    ``MAX_REFUSED_IDS`` requests with an id, ``request_id`` is the first of them. The record
    contains no text written by a client. If there are too many kinds of refusals, the excess has
    the door ``OTHER_REFUSALS`` and the status 400, 500 or 0 (any).

    ``gateway_id``, ``recorded_ns`` and ``number`` identify a record.
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


# Few kinds of refusal occur more often within the second of a record, so nearly every refusal can
# be found by its id; a flood does not make the record longer.
MAX_REFUSED_IDS = 8
OTHER_REFUSALS = "others"
# ClickHouse's DateTime, by which rows expire, ends in 2106: a later time is a mistake.
MAX_RECORD_TIME_NS = ((1 << 32) - 1) * 1_000_000_000


class LossCause(StrEnum):
    """Cause of the loss of a worker or its engine's process."""

    STOPPED = "stopped"
    SILENT = "silent"
    REPLACED = "replaced"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"


class LossObserver(StrEnum):
    """Part that observed a loss."""

    SCHEDULER = "scheduler"
    PROCESS_KEEPER = "process_keeper"
    WORKER = "worker"


class WorkerLossRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="worker_loss"):
    """Loss of a worker, as one part observed it: the same loss may have a record of each part.

    A scheduler observes that a worker says goodbye (STOPPED), is silent, or has a successor of its
    name (REPLACED); ``lost_ns`` is then the worker's last heartbeat, so all schedulers record the
    same time. The process keeper of a local system observes the end of the process: by a SIGNAL,
    with an EXIT code, or killed for lack of memory; ``detail`` is the signal's name or the code. A
    worker observes the same of its engine's process, after which it starts another engine.
    ``num_requests`` ran or waited there, by its last heartbeat or the worker's own count.
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
