"""What the other packages see of the bus: ``Bus``, and what it has of its own for each transport.

``bus.nats`` speaks to a real nats-server, ``bus.memory`` is the double; both pass the same test
classes. What is written once for both is a class of its own, over a ``bus.transport.Transport`` or
a ``bus.store.journal.Journal``. Callbacks named ``on_*`` are plain functions that must return at
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
    """A record in the outbox. ``payload`` is its MessagePack encoding, ``sequence`` its place."""

    sequence: int
    subject: str
    payload: bytes
    lease: str


class Results(Protocol):
    """Final results of asynchronous jobs, kept for a day."""

    async def store(self, result: JobResult) -> None:
        """Returns when it is stored; a second result of the same request is ignored, unless the
        first is that of a message that was no job, whose id is free."""

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None: ...

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        """Tell the request ids of results as they come. Those of an outage are not told, and one
        that is told may be stored a moment later: ``fetch`` is what counts."""


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

    async def reach(
        self, worker_id: str, command: WorkerCommand, timeout_s: float, others: Sequence[str] = ()
    ) -> bool:
        """Ask a worker that is silent over the other servers of the cluster. If it answers well
        over one of them, the bus moves there, as in a reconnect: whether it did. ``others`` are
        workers that are to be reached there, too, as far as there is a choice; each of them is
        sent the command."""

    async def close(self) -> None: ...
