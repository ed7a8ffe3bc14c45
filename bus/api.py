"""What the other packages see of the bus: one narrow protocol per concern, of which
``bus.job_queue`` has that of the work queue.

``bus.nats`` speaks to a real nats-server, ``bus.memory`` is the double; both pass the same test
classes. Callbacks named ``on_*`` are plain functions that must return at once: they run on the
event loop's read path.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from bus.job_queue import JobQueue
from bus.storage import Storage
from bus.transport import Subscription
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
from schemas.errors import MillraceError
from schemas.frames import Frame
from schemas.jobs import JobResult
from schemas.records import Record


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A record in the outbox. ``payload`` is its MessagePack encoding, ``sequence`` its place."""

    sequence: int
    subject: str
    payload: bytes
    lease: str


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

        Frames sent while the server is unreachable may be lost: readers ask for a replay.
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


class JournalConflictError(MillraceError, code="conflict", retryable=True, http_status=409):
    """Somebody else wrote under that name in the meantime; nothing was stored."""

    def __init__(self) -> None:
        super().__init__("Somebody else changed it at the same time. Try again.")


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

    async def publish(self, record: Record, linger_s: float = 0.0) -> None:
        """Returns when it is stored; a request's second record of the same kind is ignored. It may
        wait ``linger_s`` for others: records that go together cost the process less."""

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
