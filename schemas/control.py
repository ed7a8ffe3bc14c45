"""What schedulers, workers and gateways say to one another (``ctl.*``, ``resume.*``, ``hb.*``)."""

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

# An epoch is (delivery - 1) * EPOCHS_PER_DELIVERY + attempt: JetStream counts deliveries and the
# scheduler that holds one counts its attempts, so epochs rise without any shared counter.
EPOCHS_PER_DELIVERY = 64


class CancelReason(StrEnum):
    """Why work is stopped."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"
    ORPHANED = "orphaned"  # its gateway is gone, and no client came back for it


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was reserved in Redis for a job that no gateway admitted. The process that ends the job
    settles it, under ``reservation_id``; if Redis has no such reservation, what the job cost is
    added to what its tenant has spent in its currency, by ``spent_key``."""

    reservation_id: str
    spent_key: str


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dispatch"):
    """Run this job and own its lease from now on.

    ``job`` has ``prompt_token_ids``, ``sampling.max_tokens`` and ``sampling.seed`` filled in.
    ``lease`` is the reply subject of the JetStream delivery. ``resume_token_ids`` were already
    delivered to the client: prefill them behind the prompt and go on from the next index.
    ``attempts`` are the attempts before this one, ``sent_ns`` is when the scheduler sent it.
    ``lives`` is the former name of ``attempts``: both are written and read in this version.
    ``reservation`` is to be settled with the end of the job, before its lease is acknowledged.
    ``adapter`` is the one that the job names, as the worker is to load it. ``kv_source`` is another
    worker that has the leading blocks of prompt and resumed tokens.
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
    """Stop a request. With ``below_epoch``, only attempts of a lower epoch: they are superseded
    and must neither acknowledge nor send a terminal frame. With ``tenant``, only if the request is
    that tenant's."""

    request_id: str
    tenant: str = ""
    reason: CancelReason = CancelReason.CLIENT
    below_epoch: int | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error by its stable code, with a sentence for people. ``retryable``: the same request may
    succeed later."""

    code: str
    message: str
    retryable: bool


class ResultError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request for a stored result was answered with none."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: MillraceError) -> ResultError:
        """The same as an error that was raised."""
        code, message, retryable = error.code, error.message, error.retryable
        return cls(error=ErrorDetail(code=code, message=message, retryable=retryable))


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="replay"):
    """Send frames of a request again, from token ``from_index`` on, to ``reply``; in JSON and in
    envelopes as its job asked for, or as ``frames_as_json`` and ``batch_frames`` say."""

    request_id: str
    from_index: int
    reply: str
    frames_as_json: bool | None = None
    batch_frames: bool | None = None


class Drain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """Accept no new work. The schedulers migrate what runs to other workers where there is room;
    the rest is finished here, or given back when the time for it is over."""

    reason: str = ""


class Warm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="warm"):
    """Pull what ``kv_source`` has of this job's prompt and ``token_ids`` so far, while the job goes
    on there: so it stands still only for what is missing then, when it is dispatched here. The
    reply comes once that is over; what has not come is pulled or computed later."""

    job: Job
    kv_source: KvSource
    token_ids: tuple[int, ...] = ()


class SetRole(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="set_role"):
    """Prefer other work from now on, until another one comes or the worker starts again. What runs
    goes on: of a worker that is for prompts now, the streams may go on at those that decode. With
    ``from_role``, only if that is what it is now: of several schedulers that ask the same, one
    gets it."""

    role: WorkerRole
    from_role: WorkerRole | None = None


class ResetPrefixCache(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reset_prefix_cache"
):
    """Empty the prefix cache, but for what requests use that run now. Requests that are dispatched
    after the reply find nothing else in it."""


WorkerCommand = Dispatch | Cancel | Replay | Drain | Warm | SetRole | ResetPrefixCache


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to a command.

    ``reason`` is a stable word when it did not comply: ``full``, ``draining``, ``wrong_model``,
    ``stale_epoch``, ``unknown_request``, ``no_roles``, ``stale_role``, ``prefix_cache_kept`` or
    ``bad_request``.
    """

    ok: bool
    reason: str = ""
    message: str = ""


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request ended, and how long its client waited, in milliseconds: from receipt to the
    first token and to the end, and for each token after the first. 0: it did not get so far."""

    status: Status
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    total_ms: float = 0.0


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The work that one attempt at a request took, and its tenant: what fair sharing charges.

    ``prompt_tokens`` were to be prefilled, of which ``cached_tokens`` were found in the cache;
    ``completion_tokens`` were made by this attempt, not by one before it. ``epoch`` is its last; it
    began at ``started_ns`` (0: it never did) and took ``device_us`` and ``energy_j`` of the device
    (see ``RequestRecord``). ``answer`` is there if it ended the request. ``pulled_tokens`` and
    ``kv_source`` as in ``Attempt``."""

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
    """Requests that a worker no longer has: answered and acknowledged, superseded or given back.
    From it to the schedulers. A scheduler that misses one finds out from the queue.

    ``served`` says what those took that ran. ``released`` are the ones of ``request_ids`` whose
    lease it gave back: the queue delivers them again, at once."""

    worker_id: str
    request_ids: tuple[str, ...]
    served: tuple[Served, ...] = ()
    released: tuple[str, ...] = ()


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests whose prompts a worker of the role ``prefill`` has computed, also before it was
    one, and whose first tokens it has sent: others may go on with them. From it to the schedulers.
    Where one is lost, the request ends where it is."""

    worker_id: str
    request_ids: tuple[str, ...]


class Pulled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that went on elsewhere and need nothing of ``worker_id``'s KV cache any more: from
    whoever runs them now to that worker. Where one is lost, it stays for them a while."""

    worker_id: str
    request_ids: tuple[str, ...]


class MoveStreams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Have other workers go on with what ``worker_id`` runs, as far as they have room now; with
    ``to_worker_id``, that one alone. It goes on taking work. From an operator to the schedulers,
    each of which moves its own."""

    worker_id: str
    to_worker_id: str = ""


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tokens the client has; ``open`` False: the client has disconnected, do not run it
    again."""

    token_ids: tuple[int, ...] = ()
    open: bool = True


class WhichHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Which of these requests does the gateway that reads this hold?"""

    request_ids: tuple[str, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests that a gateway holds, of those in a ``WhichHeld``."""

    request_ids: tuple[str, ...] = ()


class DeliveryStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client saw of one job's answer before another connection continued it, in the terms of
    ``DeliveryRecord``. Times are UTC epoch in ns, 0 for what had not happened; ``epoch`` is that of
    the latest frame, one of ``num_epochs``."""

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
    """What the gateway that had a stream has read of it; it has handed the stream over to the one
    that asked. ``seen`` is by the id of the job, of which an answer may have several.
    ``started_ns`` is given by a gateway that does not have the answer: one that it accepted after
    that time has ended there, and was counted."""

    token_ids: tuple[int, ...] = ()
    seen: dict[str, DeliveryStatistics] = {}
    started_ns: int | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's capacity and load, sent every heartbeat.

    ``worker_id`` is unique to one incarnation; ``name`` stays over restarts, so a status with a
    known name and a new id says that the former incarnation is over. ``max_tokens_per_request``
    is the longest prompt + completion that its KV cache can ever hold; ``max_num_waiting`` is how
    many requests it accepts beyond those that can run; those of a lower tier do not count, as they
    are preempted. ``num_held_by_tier`` counts what runs and waits here, ``num_ending`` what has
    ended and whose record or acknowledgement is not stored so far. ``outstanding_tokens`` are
    still to be computed, ``outstanding_prompt_tokens`` of them prefilled. ``prefill_tokens_per_s``
    and ``decode_step_ms`` are measured, of late (0: nothing to measure so far). ``prefix_salted``:
    what it cached of a tenant's prompts is for that tenant only, under the tenant's name as salt.
    It computes on ``num_devices``, all of them at a time: what is measured is of the group.
    ``weights`` are the fingerprint of those that it serves (empty: nobody can tell; None: it does
    not say), since a stream moves only among the same ones. ``role`` is what work it is
    preferred for now. Peers pull blocks of its KV cache from ``transfer`` (None: it hands none
    over); it has pulled ``pull_tokens_per_s`` from others of late (0: nothing so far), and
    ``outstanding_pull_tokens`` are on their way to it, which are not among those to be computed.
    ``adapters`` are in its ``max_adapters`` slots (0: it takes none); ``adapter_load_ms`` is what
    the last ones took to load (0: none was).
    ``engine_down``: its engine has ended and the next one is loading, so its requests pause, and
    go on sooner at a worker with room.
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
    """Who holds a worker's name, in the bucket ``workers`` under ``name.<name>``.

    ``holder`` is unique to one incarnation, and empty once it has given the name back. It writes
    the entry anew every ``renew_s``; an entry that stays the same for several times as long is that
    of a dead holder."""

    holder: str
    renew_s: float = 0.0


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's prefix cache holds, in small steps, on ``prefix.<worker>``.

    Keys are the first 8 bytes of ``schemas.prefix`` keys, one behind the other. ``number`` counts
    an incarnation's reports; ``whole`` replaces everything said before, else ``added`` and
    ``removed`` change it. A reader that misses a number waits for the next whole one."""

    worker_id: str
    model: str
    number: int
    whole: bool = False
    added: bytes = b""
    removed: bytes = b""


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model's queue stands, from the schedulers to the gateways a few times a second.

    ``num_queued`` are all that wait, ``num_published`` those of them that services published on the
    bus: the ``bound`` is for the others. ``ttft_ms`` is what a job of each tier that comes now is
    predicted to wait for its first token (absent: unknown), ``tenant_ttft_ms`` that of tenants for
    whom it is longer, since they have jobs waiting. ``oldest_wait_s`` is of all tiers,
    ``interactive_wait_s`` of those but batch. ``desired_workers`` is the autoscaler's number."""

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
        """The waiting jobs that count against the bound."""
        return self.num_queued - self.num_published

    @property
    def is_full(self) -> bool:
        return self.num_bounded >= self.bound

    def ttft_ms_of(self, tier: Tier, tenant: str) -> float | None:
        """What is predicted for a job of a tenant; None: unknown."""
        return self.tenant_ttft_ms.get(tier, {}).get(tenant, self.ttft_ms.get(tier))


class TelemetryQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A saved query of ``telemetry/queries`` by name, for the operations page."""

    name: str
    params: dict[str, str | int | float] = {}
    format: Literal["json", "csv"] = "json"


class TelemetryAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows as a JSON array of objects or as CSV with a line of names, or why not: a sentence, its
    stable code, and the parameter that is at fault, if one is."""

    rows_json: bytes = b"[]"
    error: str = ""
    rows_csv: bytes = b""
    code: str = ""
    param: str = ""
