"""What the other packages see of the bus: one narrow protocol per concern.

``bus.nats`` speaks to a real nats-server, ``bus.memory`` is the double; both pass the same test
classes. Callbacks named ``on_*`` are plain functions that must return at once: they run on the
event loop's read path.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from bus.storage import Storage
from schemas.control import (
    Cancel,
    Ended,
    HandedOver,
    NameLease,
    PrefixReport,
    QueueStatus,
    ResumePoint,
    TelemetryAnswer,
    TelemetryQuery,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from schemas.frames import Frame
from schemas.jobs import DeadJob, Job, JobResult, Tier
from schemas.records import Record


class Subscription(Protocol):
    """Something that delivers to a callback until it is closed."""

    async def close(self) -> None: ...


class TenantQueue(NamedTuple):
    """Where the jobs of one tenant for one model in one tier wait, in order of arrival.

    A job that was published without a tenant in its subject is the keyless tenant's, and waits in
    the tenant queue of ``tenant`` None. ``reserved``: gateways published them, which keep their
    callers' limits; all others count against their tenant's when they are pulled. Who may say so is
    up to the permissions of the server: the tenant queue is the subject.
    """

    model: str
    tier: Tier
    tenant: str | None
    reserved: bool = False

    @classmethod
    def of(cls, job: Job, *, reserved: bool = False) -> TenantQueue:
        """Where a job waits that ``JobQueue.publish`` stored."""
        return cls(job.model, job.tier, job.tenant, reserved)

    @property
    def twin(self) -> TenantQueue:
        """The other tenant queue of the same tenant."""
        return self._replace(reserved=not self.reserved)


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that this process now holds, and the lease to keep it by.

    The holder extends the lease well within AckWait, or hands the lease string to another process
    which does. ``num_deliveries`` is 1 for a job that nobody held before, unless ``uncertain``:
    then the queue may have lost count. That is so for jobs that are older than this process's
    first pull from their tenant queue, or the first since the server was away. ``stored_ns`` is
    when the queue got it, UTC epoch.
    """

    job: Job
    lease: str
    num_deliveries: int
    stream_sequence: int
    tenant_queue: TenantQueue
    uncertain: bool = False
    stored_ns: int = 0


class PublishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The queue has stored the job; ``duplicate``: it had it already, nothing was added."""

    stream_sequence: int
    duplicate: bool


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a tenant queue that wait in the stream, and jobs that somebody holds."""

    num_queued: int
    num_leased: int


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A record in the outbox. ``payload`` is its MessagePack encoding, ``sequence`` its place."""

    sequence: int
    subject: str
    payload: bytes
    lease: str


class JobQueue(Protocol):
    """The work queue ``JOBS`` and its leases."""

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        """Store a job; once this returns the job will be answered. ``reserved``: what it may use
        was set aside, and its publisher settles that; a service may not publish so.

        Raises PayloadTooLargeError, QueueFullError or BusUnavailableError: nothing was stored.
        """

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        """Up to ``max_jobs`` jobs of a tenant queue, as soon as there is one; an empty list after
        ``timeout_s``, which may be 0.

        A message that cannot be decoded, and a job that was delivered too often, is moved to the
        dead letters and never returned; its owner, as far as it can be told, gets a Failed frame,
        and a job its record. An empty list is also what a server that is away gives.
        """

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        """Tell the tenant queue of each job that is stored. Those of an outage are not told:
        ``tenant_queues`` is what counts."""

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        """The tenant queues with jobs, waiting or held, and how many; the models may be unknown.

        Messages under subjects that name no tenant queue are moved to the dead letters, some at a
        time.
        """

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        """Free what the server keeps for a tenant queue that has no job, waiting or held; False if
        it has one. Jobs that come later are found again."""

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth: ...

    async def is_open(self, stream_sequence: int) -> bool:
        """Whether the job is still in the queue, waiting or held; False once it was acked.

        Raises BusUnavailableError when nobody can say.
        """

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        """Take up to ``count`` of the newest waiting jobs out of a tenant queue; each job is handed
        to one caller only, who must answer it."""

    async def extend(self, lease: str) -> None:
        """Hold the job for another AckWait. Any process may, by the lease alone.

        Never raises for a server that is away: the job then lasts until its lease ends.
        """

    async def ack(self, lease: str) -> None:
        """The job is answered; it leaves the queue for good. Returns when the server knows.

        May be called again. Raises BusUnavailableError if the server cannot be told.
        """

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        """Give the job back, to be delivered again after ``delay_s``; if the server is away, its
        lease ends by itself."""

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        """Store a job among the dead letters, then take it out of the queue."""


class FrameStreams(Protocol):
    """Frames on ``tok.<reply>.<request>``: at most once, in order, never waiting for a reader."""

    async def publish(
        self,
        reply: str,
        frames: Sequence[tuple[str, Frame]],
        *,
        batch: bool = False,
        as_json: bool = False,
    ) -> None:
        """Send (request_id, frame) pairs to one listener; as one envelope if ``batch``.

        Frames sent while the server is away may be lost: readers ask for a replay.
        """

    async def subscribe(self, reply: str, on_frame: Callable[[str, Frame], None]) -> Subscription:
        """Hear what is sent to ``reply``, whosever name that is; all who listen hear all of it."""


class Control(Protocol):
    """Requests to workers and gateways, cancels and queue status for everybody."""

    async def command(
        self, worker_id: str, command: WorkerCommand, timeout_s: float
    ) -> WorkerReply | None:
        """A worker's answer, or None if it gave none in time."""

    async def serve_commands(
        self, worker_id: str, handler: Callable[[WorkerCommand], Awaitable[WorkerReply]]
    ) -> Subscription: ...

    async def cancel(self, cancel: Cancel) -> None:
        """Tell every scheduler and worker to stop a request."""

    async def subscribe_cancels(self, on_cancel: Callable[[Cancel], None]) -> Subscription: ...

    async def publish_ended(self, ended: Ended) -> None:
        """Tell every scheduler which requests a worker holds no more."""

    async def subscribe_ended(self, on_ended: Callable[[Ended], None]) -> Subscription: ...

    async def resume_point(
        self, reply: str, request_id: str, timeout_s: float
    ) -> ResumePoint | None:
        """What the client has, or None if nobody answered in time."""

    async def serve_resume_points(
        self, reply: str, handler: Callable[[str], ResumePoint | None]
    ) -> Subscription:
        """Answer for the streams of ``reply``, whosever name that is; the handler gets a request
        id, None stays silent. Several may serve one name: the first answer is taken."""

    async def hand_over(
        self, gateway_id: str, request_id: str, timeout_s: float
    ) -> HandedOver | None:
        """Ask the gateway that holds a stream to let go of it; what it had read of it, or None if
        it does not hold it. That nobody is there is known at once."""

    async def is_gateway_there(self, gateway_id: str, request_id: str, timeout_s: float) -> bool:
        """Whether the gateway that holds a stream is alive; it goes on holding it. That nobody is
        there is known at once."""

    async def serve_handovers(
        self, gateway_id: str, handler: Callable[[str], HandedOver | None]
    ) -> Subscription:
        """Let go of streams for those who ask; the handler gets a request id, None stays silent."""

    async def publish_queue_status(self, status: QueueStatus) -> None: ...

    async def subscribe_queue_status(
        self, on_status: Callable[[QueueStatus], None]
    ) -> Subscription: ...

    async def query_telemetry(
        self, query: TelemetryQuery, timeout_s: float
    ) -> TelemetryAnswer | None: ...

    async def serve_telemetry(
        self, handler: Callable[[TelemetryQuery], Awaitable[TelemetryAnswer]]
    ) -> Subscription: ...


class HeldName(NamedTuple):
    """A lease as it is in the bucket; ``revision`` changes when it is written."""

    lease: NameLease
    revision: int


class WorkerDirectory(Protocol):
    """Who works: the KV bucket ``workers`` for newcomers, heartbeats for those who watch."""

    async def announce(self, status: WorkerStatus) -> None:
        """Send a heartbeat; a status with ``retired`` removes the worker at once."""

    async def watch(self, on_status: Callable[[WorkerStatus], None]) -> Subscription:
        """The known workers first, then every heartbeat. Silence is for the watcher to notice."""

    async def silences_s(self) -> dict[str, float]:
        """For how long each worker in the bucket has not announced itself there, by the bucket's
        own clock, or a little less. Raises BusUnavailableError."""

    async def hold_name(self, name: str, lease: NameLease, after: int) -> int | None:
        """Write who holds a worker's name, if its entry has the revision ``after`` (0: if it has
        none); its revision now, or None if it was another. It is forgotten after ``ENTRY_TTL_S``.

        Raises BusUnavailableError: nobody knows whether it was written.
        """

    async def name_holder(self, name: str) -> HeldName | None:
        """Who holds a worker's name, by the last word of it. Raises BusUnavailableError."""

    async def report_prefixes(self, report: PrefixReport) -> None:
        """Tell the schedulers what a worker's prefix cache holds; at most once."""

    async def watch_prefixes(self, on_report: Callable[[PrefixReport], None]) -> Subscription: ...


class Results(Protocol):
    """Final results of asynchronous jobs, kept for a day."""

    async def store(self, result: JobResult) -> None:
        """Returns when it is stored; a second result of the same request is ignored."""

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None: ...

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        """Tell the request ids of results as they come. Those of an outage are not told, and one
        that is told may be stored a moment later: ``fetch`` is what counts."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry and its place; sequences of one name only grow."""

    sequence: int
    payload: bytes


class Journal(Protocol):
    """Entries in order under names, kept for ``nats.files_ttl_s``: what files and batches are
    made of. Names are those of ``bus.subjects``, section "files and batches".

    Every method raises BusUnavailableError while nobody can say.
    """

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        """Store an entry behind the one with the sequence ``after``, which must be the name's last
        (0: it must have none); with ``replace`` those before it go. Returns its sequence.

        Raises JournalConflictError if another entry is the last one, and PayloadTooLargeError:
        nothing was stored.
        """

    async def next(self, name: str, after: int) -> JournalEntry | None:
        """The first entry behind a sequence."""

    async def last(self, name: str) -> JournalEntry | None:
        """The newest entry, never an older one."""

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        """The newest entries of those names that have any."""

    async def names(self, pattern: str) -> list[str]:
        """The names with entries that match a pattern, sorted."""

    async def drop(self, name: str) -> None:
        """Remove every entry of a name."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that were stored once and for all. ``sha256`` is hexadecimal; ``metadata`` is the
    owner's own."""

    name: str
    size_bytes: int
    num_chunks: int
    sha256: str
    upload_id: str
    stored_ns: int
    metadata: dict[str, str]


class Objects(Protocol):
    """Large immutable things, each under its owner and a name, kept for ``ttl_s``."""

    @property
    def ttl_s(self) -> float: ...

    async def put(
        self, owner: str, name: str, chunks: AsyncIterable[bytes], metadata: dict[str, str]
    ) -> StoredObject:
        """Store bytes as they come, in pieces that fit a message. If there is an object of that
        name already, it stays and is returned. Raises BusUnavailableError, and whatever ``chunks``
        raises: nothing is stored then."""

    async def info(self, owner: str, name: str) -> StoredObject | None: ...

    async def infos(self, owner: str, names: Sequence[str]) -> list[StoredObject]:
        """Those that are there, in the order of ``names``."""

    async def names(self, owner: str) -> list[str]:
        """The names of all of an owner's objects, sorted."""

    def read(self, stored: StoredObject) -> AsyncIterator[bytes]:
        """Its bytes, piece by piece. Raises ObjectLostError when they are not all there."""

    async def delete(self, owner: str, name: str) -> bool:
        """Whether it was there."""


class Outbox(Protocol):
    """Records on their way to Kafka, kept until they are old."""

    async def publish(self, record: Record, patience_s: float = 0.0) -> None:
        """Returns when it is stored; a request's second record of the same kind is ignored. It may
        wait ``patience_s`` for others: records that go together cost the process less."""

    async def pull(self, max_records: int, timeout_s: float) -> list[OutboxMessage]:
        """The next records that the bridge has not acknowledged yet."""

    async def ack(self, messages: Sequence[OutboxMessage]) -> None: ...

    async def rewind(self, sequence: int) -> None:
        """Deliver again every record after ``sequence``, in order, to the bridge."""

    async def last_sequence(self) -> int:
        """The newest record's sequence; 0 when there is none."""

    async def num_waiting(self) -> int:
        """How many records no bridge has acknowledged yet."""


class Bus(Protocol):
    """All of it, over one connection."""

    jobs: JobQueue
    frames: FrameStreams
    control: Control
    workers: WorkerDirectory
    results: Results
    outbox: Outbox
    journal: Journal
    objects: Objects
    storage: Storage

    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def connected(self) -> bool: ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call back after each time that the connection came back: frames may be missing."""

    async def close(self) -> None: ...
