"""Control messages of schedulers, workers and gateways (``ctl.*``, ``resume.*``, ``hb.*``)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.models.adapters import AdapterRef, LoadedAdapter
from millrace.schemas.records import Attempt, Status, fill_both_names
from millrace.schemas.transfer import KvSource, TransferEndpoint

# An epoch is (delivery - 1) * EPOCHS_PER_DELIVERY + attempt. JetStream counts deliveries, and the
# scheduler with the delivery counts its attempts, so epochs rise without a shared counter.
EPOCHS_PER_DELIVERY = 64


class CancelReason(StrEnum):
    """Reason of a cancellation."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"
    ORPHANED = "orphaned"  # its gateway is gone, and its client did not come back


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reservation in Redis for a job that no gateway admitted. The process that ends the job
    settles it under ``reservation_id``. If Redis has no such reservation, the job's cost is added
    to its tenant's spending in its currency, by ``spent_key``."""

    reservation_id: str
    spent_key: str


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dispatch"):
    """Command to run a job and own its lease from now on.

    ``job`` has ``prompt_token_ids``, ``sampling.max_tokens`` and ``sampling.seed`` filled in.
    ``lease`` is the reply subject of the JetStream delivery. ``resume_token_ids`` were already
    delivered to the client: prefill them after the prompt and continue with the next index.
    ``attempts`` are the earlier attempts; ``sent_ns`` is the time at which the scheduler sent the
    dispatch. ``lives`` is the former name of ``attempts``: this version writes and reads both.
    Settle ``reservation`` with the end of the job, before its lease is acknowledged. ``adapter`` is
    the job's adapter, as the worker loads it. ``kv_source`` is another worker that has the leading
    blocks of the prompt and the resumed tokens.
    """

    job: Job
    epoch: int
    lease: str
    resume_token_ids: tuple[int, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    lives: tuple[Attempt, ...] = ()
    sent_ns: int = 0
    reservation: Reservation | None = None
    adapter: AdapterRef | None = None
    kv_source: KvSource | None = None

    def __post_init__(self) -> None:
        fill_both_names(self, self.attempts, self.lives)


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel"):
    """Command to stop a request. With ``below_epoch``, stop only attempts of a lower epoch: they
    are superseded and must neither acknowledge nor send a terminal frame. With ``tenant``, stop the
    request only if it belongs to that tenant."""

    request_id: str
    tenant: str = ""
    reason: CancelReason = CancelReason.CLIENT
    below_epoch: int | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Error with its stable code and a sentence for people. ``retryable``: the same request may
    succeed later."""

    code: str
    message: str
    retryable: bool


class ResultError(msgspec.Struct, frozen=True, kw_only=True):
    """Error answer to a request for a stored result."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: MillraceError) -> ResultError:
        """Convert an exception to this message."""
        code, message, retryable = error.code, error.message, error.retryable
        return cls(error=ErrorDetail(code=code, message=message, retryable=retryable))


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="replay"):
    """Command to send frames of a request again to ``reply``, from token ``from_index`` on. The
    frames are JSON or envelopes as the job asked, or as ``frames_as_json`` and ``batch_frames``
    say."""

    request_id: str
    from_index: int
    reply: str
    frames_as_json: bool | None = None
    batch_frames: bool | None = None


class Drain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """Command to accept no new work. The schedulers migrate running requests to workers with room;
    the rest finish here, or are released when the drain time is over."""

    reason: str = ""


class Warm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="warm"):
    """Command to pull the KV blocks that ``kv_source`` has of this job's prompt and ``token_ids``,
    while the job continues there. When the job is dispatched here, only the missing blocks are
    transferred, which shortens its pause. The reply comes at the end of the pull; missing blocks
    are pulled or computed later."""

    job: Job
    kv_source: KvSource
    token_ids: tuple[int, ...] = ()


class SetRole(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="set_role"):
    """Command to prefer other work, until the next such command or a restart. Running requests
    continue; streams of a worker that becomes a ``prefill`` worker may move to decode workers. With
    ``from_role``, the role changes only if it equals ``from_role`` now: if several schedulers ask
    for the same switch, one succeeds."""

    role: WorkerRole
    from_role: WorkerRole | None = None


class ResetPrefixCache(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reset_prefix_cache"
):
    """Command to empty the prefix cache, except for blocks of running requests. Requests dispatched
    after the reply find no other blocks in it."""


WorkerCommand = Dispatch | Cancel | Replay | Drain | Warm | SetRole | ResetPrefixCache


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a worker to a command.

    If the worker did not comply, ``reason`` is a stable word: ``full``, ``draining``,
    ``wrong_model``, ``stale_epoch``, ``unknown_request``, ``no_roles``, ``stale_role``,
    ``prefix_cache_kept`` or ``bad_request``.
    """

    ok: bool
    reason: str = ""
    message: str = ""


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status and client-visible latencies of a request, in milliseconds: receipt to first token,
    receipt to end, and time per token after the first. 0: the request did not get so far."""

    status: Status
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    total_ms: float = 0.0


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work and tenant of one attempt at a request, which fair sharing charges.

    ``prompt_tokens`` were to be prefilled; ``cached_tokens`` of them were found in the cache.
    ``completion_tokens`` were made by this attempt, not by an earlier one. ``epoch`` is its last
    epoch. The attempt began at ``started_ns`` (0: never) and took ``device_us`` and ``energy_j`` of
    the device (see ``RequestRecord``). ``answer`` is set if the attempt ended the request.
    ``pulled_tokens`` and ``kv_source`` are as in ``Attempt``.
    """

    request_id: str
    tenant: str
    tier: Tier
    answer: AnswerTimes | None = None
    epoch: int = 0
    started_ns: int = 0
    device_us: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    energy_j: float | None = None
    pulled_tokens: int = 0
    kv_source: str = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Notice to the schedulers of requests that a worker no longer has: answered and acknowledged,
    superseded or released. A scheduler that misses this message learns it from the queue.

    ``served`` holds the work of the requests that ran. ``released`` are the members of
    ``request_ids`` whose lease the worker gave back: the queue redelivers them at once.
    """

    worker_id: str
    request_ids: tuple[str, ...]
    served: tuple[Served, ...] = ()
    released: tuple[str, ...] = ()


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Notice to the schedulers of requests whose prompt is computed and whose first token is sent,
    by a worker of the role ``prefill`` (also before it had that role). Decode workers may continue
    them. If the message is lost, the request ends at this worker."""

    worker_id: str
    request_ids: tuple[str, ...]


class Pulled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Notice to ``worker_id`` that these requests run elsewhere and no longer need its KV cache,
    sent by their current worker. If the message is lost, the blocks stay for a while."""

    worker_id: str
    request_ids: tuple[str, ...]


class MoveStreams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Command to move the streams of ``worker_id`` to other workers, as far as these have room now;
    with ``to_worker_id``, to that worker alone. The worker keeps accepting work. An operator sends
    it to the schedulers, and each scheduler moves its own jobs."""

    worker_id: str
    to_worker_id: str = ""


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that the client has. ``open`` False: the client has disconnected; do not run the
    request again."""

    token_ids: tuple[int, ...] = ()
    open: bool = True


class WhichHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Question to a gateway: which of these requests does it hold?"""

    request_ids: tuple[str, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to ``WhichHeld``: the requests that the gateway holds."""

    request_ids: tuple[str, ...] = ()


class DeliveryStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Delivery of one job's answer to a client up to a reconnect, in the terms of
    ``DeliveryRecord``. Times are UTC epoch in ns, 0 for events that had not happened. ``epoch`` is
    the epoch of the latest frame, one of ``num_epochs``."""

    received_ns: int
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_replays: int = 0
    num_epochs: int = 0
    epoch: int = -1
    num_resumes: int = 0
    num_stalls: int = 0
    stalled_ms: float = 0.0
    longest_gap_ms: float = 0.0
    intake_ms: float = 0.0


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that the former gateway of a stream has read; it hands the stream over to the gateway
    that asked. ``seen`` is by job id, since an answer may have several jobs. A gateway that does
    not have the answer sets ``started_ns``: an answer that it accepted after that time has ended
    there, and was counted."""

    token_ids: tuple[int, ...] = ()
    seen: dict[str, DeliveryStatistics] = {}
    started_ns: int | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity and load of a worker, sent every heartbeat.

    ``worker_id`` is unique to one incarnation; ``name`` stays over restarts, so a status with a
    known name and a new id means that the former incarnation is over. ``max_tokens_per_request`` is
    the longest prompt + completion that its KV cache can ever hold. ``max_num_waiting`` is the
    number of requests that it accepts beyond its running requests; requests of a lower tier do not
    count, as they are preempted. ``num_held_by_tier`` counts running and waiting requests.
    ``num_ending`` counts ended requests whose record or acknowledgement is not stored yet.
    ``outstanding_tokens`` are still to be computed, ``outstanding_prompt_tokens`` of them
    prefilled. ``prefill_tokens_per_s`` and ``decode_step_ms`` are recent measurements (0: none
    yet). ``prefix_salted``: cached prompts of a tenant are for that tenant only, with the tenant's
    name as salt. The worker computes on ``num_devices``, all at a time: measurements are of the
    group. ``weights`` is the fingerprint of its weights (empty: unknown; None: not reported); a
    stream moves only between equal fingerprints. ``role`` is its preferred work now. Peers pull
    blocks of its KV cache from ``transfer`` (None: it serves none). It has recently pulled
    ``pull_tokens_per_s`` from peers (0: none yet); ``outstanding_pull_tokens`` are on their way to
    it and are not among the tokens to compute. ``adapters`` are in its ``max_adapters`` slots (0:
    no adapters); ``adapter_load_ms`` is the load time of the latest adapters (0: none loaded yet).
    ``engine_down``: its engine has ended and the next one is loading, so its requests pause, and
    continue sooner at a worker with room.
    """

    worker_id: str
    name: str
    model: str
    max_num_sequences: int
    max_num_waiting: int = 0
    num_running: int = 0
    num_waiting: int = 0
    block_size_tokens: int = 16
    num_blocks: int = 0
    num_free_blocks: int = 0
    max_tokens_per_request: int = 0
    outstanding_tokens: int = 0
    outstanding_prompt_tokens: int = 0
    num_held_by_tier: dict[Tier, int] = {}
    num_ending: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    prefix_salted: bool = False
    weights: str | None = None
    adapters: tuple[LoadedAdapter, ...] = ()
    max_adapters: int = 0
    adapter_load_ms: float = 0.0
    num_devices: int = 1
    role: WorkerRole = WorkerRole.BOTH
    transfer: TransferEndpoint | None = None
    pull_tokens_per_s: float = 0.0
    outstanding_pull_tokens: int = 0
    draining: bool = False
    engine_down: bool = False
    retired: bool = False
    started_ns: int = 0
    sent_ns: int = 0


class NameLease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lease of a worker's name, in the bucket ``workers`` under ``name.<name>``.

    ``holder`` is unique to one incarnation, and empty once it has released the name. The holder
    rewrites the entry every ``renew_s``; an entry that is unchanged for several times as long
    belongs to a dead holder.
    """

    holder: str
    renew_s: float = 0.0


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of a worker's prefix cache in small steps, on ``prefix.<worker>``.

    Keys are the first 8 bytes of ``schemas.prefix`` keys, concatenated. ``number`` counts an
    incarnation's reports. ``whole`` replaces all earlier reports; otherwise ``added`` and
    ``removed`` change them. A reader that misses a number waits for the next whole report.
    """

    worker_id: str
    model: str
    number: int
    whole: bool = False
    added: bytes = b""
    removed: bytes = b""


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a model's queue, sent by the schedulers to the gateways a few times a second.

    ``num_queued`` counts all waiting jobs, ``num_published`` the waiting jobs that services
    published on the bus: ``bound`` applies to the others. ``ttft_ms`` is the predicted time to
    first token of a new job, by tier (absent: unknown). ``tenant_ttft_ms`` is the same for tenants
    with a longer prediction, since they have jobs waiting. ``oldest_wait_s`` covers all tiers,
    ``interactive_wait_s`` all but batch. ``desired_workers`` is the autoscaler's number.
    """

    model: str
    num_queued: int
    bound: int
    num_published: int = 0
    retry_after_s: float = 0.0
    num_workers: int = 0
    eta_s: float | None = None
    ttft_ms: dict[Tier, float] = {}
    tenant_ttft_ms: dict[Tier, dict[str, float]] = {}
    oldest_wait_s: float = 0.0
    interactive_wait_s: float = 0.0
    desired_workers: int = 0
    sent_ns: int = 0

    @property
    def num_bounded(self) -> int:
        """Number of waiting jobs that count against the bound."""
        return self.num_queued - self.num_published

    @property
    def is_full(self) -> bool:
        return self.num_bounded >= self.bound

    def ttft_ms_of(self, tier: Tier, tenant: str) -> float | None:
        """Return the predicted time to first token of a tenant's job; None: unknown."""
        return self.tenant_ttft_ms.get(tier, {}).get(tenant, self.ttft_ms.get(tier))


class TelemetryQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Saved query of ``telemetry/queries`` by name, for the operations page."""

    name: str
    params: dict[str, str | int | float] = {}
    format: Literal["json", "csv"] = "json"


class TelemetryAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a query: rows as a JSON array of objects or as CSV with a header line. On failure:
    an error sentence, its stable code, and the parameter at fault, if any."""

    rows_json: bytes = b"[]"
    error: str = ""
    rows_csv: bytes = b""
    code: str = ""
    param: str = ""
