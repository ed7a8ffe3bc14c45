"""Bus interface of the other packages: ``Bus`` and the parts that differ by transport.

``bus.nats`` implements it on a real nats-server, ``bus.memory`` in memory. Both pass the same test
classes. Code that is common to both is a class over a ``bus.transport.Transport`` or a
``bus.store.journal.Journal``. Callbacks named ``on_*`` are plain functions that must return at
once: they run on the event loop's read path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from millrace.bus.control import Control
from millrace.bus.fleet.directory import WorkerDirectory
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import JobQueue
from millrace.bus.storage import Storage
from millrace.bus.store.objects import Journal, Objects
from millrace.bus.transport import Subscription
from millrace.schemas.control import WorkerCommand
from millrace.schemas.jobs import JobResult
from millrace.schemas.records import Record


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Record in the outbox. ``payload`` is its MessagePack encoding, ``sequence`` its place."""

    sequence: int
    subject: str
    payload: bytes
    lease: str


class Results(Protocol):
    """Final results of asynchronous jobs, kept for a day."""

    async def store(self, result: JobResult) -> None:
        """Store a result. Returns once it is stored.

        A second result of the same request is ignored, unless the first one belongs to a message
        that was no job: its id is free.
        """

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None: ...

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        """Call ``on_stored`` with the request id of each new result.

        Results stored during an outage are not announced, and an announced result may be stored a
        moment later. ``fetch`` is authoritative.
        """


class Outbox(Protocol):
    """Records on their way to Kafka, kept until they expire."""

    async def publish(self, record: Record, linger_s: float = 0.0) -> None:
        """Store a record. Returns once it is stored.

        A request's second record of the same kind is ignored. The record may wait ``linger_s`` for
        others: records that are sent together cost the process less.
        """

    async def pull(self, max_records: int, timeout_s: float) -> list[OutboxMessage]:
        """Return the next records that the bridge has not acknowledged."""

    async def ack(self, messages: Sequence[OutboxMessage]) -> None: ...

    async def rewind(self, sequence: int) -> None:
        """Deliver every record after ``sequence`` to the bridge again, in order."""

    async def last_sequence(self) -> int:
        """Return the newest record's sequence; 0 without records."""

    async def num_waiting(self) -> int:
        """Return the number of records that no bridge has acknowledged."""


class Bus(Protocol):
    """All parts of the bus over one connection."""

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
        """Register a callback for each reconnect: frames may be missing then."""

    async def reach(
        self, worker_id: str, command: WorkerCommand, timeout_s: float, others: Sequence[str] = ()
    ) -> bool:
        """Look for a silent worker over the other servers of the cluster.

        If the worker accepts the command over another server, the bus moves there, as in a
        reconnect. Of several such servers, it prefers the server that reaches most of ``others``.
        Each of these is sent the command, too. Returns True if the bus moved.
        """

    async def close(self) -> None: ...
