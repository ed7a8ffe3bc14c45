"""Client of a NATS server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millrace.bus.api import Outbox, Results
from millrace.bus.control import Control
from millrace.bus.fleet.directory import WorkerDirectory
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import JobQueue
from millrace.bus.jobs.ends import JobRefusals
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.jobs import NatsJobQueue
from millrace.bus.nats.permissions import Part, inbox_of
from millrace.bus.nats.puller import PullInbox
from millrace.bus.nats.servers.detour import Detours
from millrace.bus.nats.stores import NatsJournal, NatsOutbox, NatsResults, NatsWorkerBucket
from millrace.bus.nats.topology import NatsStorage, ensure_streams, require_streams
from millrace.bus.storage import Storage
from millrace.bus.store.objects import Journal, Objects
from millrace.runtime.clock import Clock, SystemClock
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import WorkerCommand
from millrace.schemas.errors import BusUnavailableError, MillraceError
from millrace.schemas.redaction import redact_urls

logger = logging.getLogger(__name__)


class NatsBus:
    """Bus on NATS, made by ``connect``. See ``bus.api.Bus``. Owns its connection."""

    def __init__(
        self, connection: Connection, config: NatsConfig, clock: Clock, part: Part
    ) -> None:
        self._connection = connection
        self._config = config
        self._part = part
        self._setup: asyncio.Task[None] | None = None
        self.frames = FrameStreams(connection)
        self.control = Control(connection)
        self.workers = WorkerDirectory(connection, NatsWorkerBucket(connection))
        self.results: Results = NatsResults(connection)
        pulls = PullInbox(connection)
        self.outbox: Outbox = NatsOutbox(connection, pulls)
        self.journal: Journal = NatsJournal(connection)
        self.objects = Objects(
            self.journal, clock, config.files_ttl_s, connection.max_payload_bytes
        )
        self.storage: Storage = NatsStorage(connection, config)
        refusals = JobRefusals(self.frames, self.results, self.outbox, clock)
        self.jobs: JobQueue = NatsJobQueue(connection, pulls, config, refusals, clock)
        self._detours = Detours(connection)
        if part is not Part.OPERATOR:
            connection.on_reconnect(self._set_up_again)

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._connection.on_reconnect(callback)

    async def reach(
        self, worker_id: str, command: WorkerCommand, timeout_s: float, others: Sequence[str] = ()
    ) -> bool:
        return await self._detours.reach(worker_id, command, timeout_s, others)

    async def close(self) -> None:
        if self._setup is not None:
            self._setup.cancel()
        await self._connection.close()

    def _set_up_again(self) -> None:
        """Set up the streams again, as a restarted server may have lost its store."""
        if self._setup is None or self._setup.done():
            self._setup = asyncio.ensure_future(self._set_up())

    async def _set_up(self) -> None:
        try:
            await _set_up(self._connection, self._config, self._part)
        except MillraceError as error:
            logger.warning("the streams could not be checked", extra={"cause": error.message})


async def connect(
    config: NatsConfig, name: str, clock: Clock | None = None, *, part: Part = Part.OPERATOR
) -> NatsBus:
    """Connect to the server at ``config.url`` and set up all streams.

    ``part`` is the kind of this process. It determines the subject of answers: a server with
    permissions lets no other user read them. It also determines the handling of streams: a
    scheduler creates and changes them, other parts create missing ones, the operator does neither.
    Once connected, the bus reconnects by itself for ever.

    Raises:
        BusUnavailableError: No server answers within ``connect_timeout_s``.
        BusForbiddenError: The process may not read its answers.
        ConfigError: An existing stream cannot be changed into ours, or the operator finds no
            streams.
    """
    connection = Connection(config, name, config.inbox_prefix or inbox_of(part))
    await connection.open()
    try:
        await _set_up(connection, config, part)
    except BaseException:
        await connection.close()
        raise
    return NatsBus(connection, config, clock or SystemClock(), part)


async def _set_up(connection: Connection, config: NatsConfig, part: Part) -> None:
    address = redact_urls(config.url)
    try:
        if part is Part.OPERATOR:
            await require_streams(connection, address)
        else:
            await ensure_streams(connection, config, changes_existing=part is Part.SCHEDULER)
    except BusUnavailableError as error:
        # A narrower error type has the server's answer.
        if type(error) is not BusUnavailableError or not connection.connected:
            raise
        raise BusUnavailableError(
            f"The NATS server at {address} answers, but its JetStream does not. Enable "
            "JetStream (nats-server -js), or correct the address."
        ) from error
