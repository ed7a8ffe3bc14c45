"""Client of the in-memory broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from millrace.bus import codec, subjects
from millrace.bus.api import Outbox, Results
from millrace.bus.control import Control
from millrace.bus.fleet.directory import WorkerDirectory
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import JobQueue
from millrace.bus.jobs.ends import JobRefusals, watch_results
from millrace.bus.memory.broker import MemoryBroker, Subscriber
from millrace.bus.memory.jobs import MemoryJobQueue
from millrace.bus.storage import Storage
from millrace.bus.store.objects import Journal, Objects
from millrace.bus.transport import Message, OnMessage, Subscription
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.control import WorkerCommand
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import JobResult

logger = logging.getLogger(__name__)


class _MemoryTransport:
    """Transport over the broker. See ``bus.transport.Transport``."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._subscribers: list[Subscriber] = []

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self._broker.require_fits(len(payload))
        self._broker.publish(subject, payload, headers)

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscriber:
        subscriber = self._broker.subscribe(subject, on_message, group)
        self._subscribers.append(subscriber)
        return subscriber

    async def probe(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        num_starts = self._broker.num_starts
        answer = await self.request(subject, payload, timeout_s)
        if not self._broker.up or self._broker.num_starts != num_starts:
            raise BusUnavailableError("The message bus cannot be reached.")
        return answer

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        self._broker.require_fits(len(payload))
        answers: list[Message] = []
        answered = asyncio.Event()

        def on_answer(message: Message) -> None:
            answers.append(message)
            answered.set()

        inbox = self._broker.new_inbox()
        subscriber = self._broker.subscribe(inbox, on_answer)
        try:
            if not self._broker.publish(subject, payload, reply=inbox):
                return None
            await wait_or_sleep(answered, self._broker.clock, timeout_s)
        finally:
            await subscriber.close()
        return answers[0] if answers else None

    async def close(self) -> None:
        for subscriber in self._subscribers:
            await subscriber.close()


class _MemoryResults:
    """Results in the broker. See ``bus.api.Results``."""

    def __init__(self, broker: MemoryBroker, transport: _MemoryTransport) -> None:
        self._broker = broker
        self._transport = transport

    async def store(self, result: JobResult) -> None:
        payload = codec.encode_json(result)
        self._broker.require_fits(len(payload))
        self._broker.require_store(subjects.RESULTS_STREAM)
        subject = subjects.result(result.tenant, result.request_id)
        known = await self.fetch(result.tenant, result.request_id)
        if known is None or (known.is_of_no_job and not result.is_of_no_job):
            self._broker.results.put(subject, payload)
        self._broker.publish(subject, payload)

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None:
        self._broker.require_up()
        payload = self._broker.results.get(subjects.result(tenant, request_id))
        return None if payload is None else codec.JOB_RESULT.decode(payload, codec.JSON)

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        return await watch_results(self._transport, tenant, on_stored)


class _MemoryStorage:
    """Storage of the broker. See ``bus.storage.Storage``."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def failed_streams(self) -> dict[str, str]:
        self._broker.require_up()
        return dict(self._broker.failed_streams)

    async def admit_jobs(self, *, admit: bool) -> None:
        self._broker.require_up()
        self._broker.admits_jobs = admit


class MemoryBus:
    """Bus on the broker. See ``bus.api.Bus``. Closing it ends only its own subscriptions."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self._transport = _MemoryTransport(broker)
        self.frames = FrameStreams(self._transport)
        self.control = Control(self._transport)
        self.workers = WorkerDirectory(self._transport, broker.workers)
        self.results: Results = _MemoryResults(broker, self._transport)
        self.outbox: Outbox = broker.outbox
        self.journal: Journal = broker.journal
        self.objects = Objects(
            self.journal, broker.clock, broker.config.files_ttl_s, broker.max_payload_bytes
        )
        self.storage: Storage = _MemoryStorage(broker)
        refusals = JobRefusals(self.frames, self.results, self.outbox, broker.clock)
        self.jobs: JobQueue = MemoryJobQueue(broker, self._transport, refusals)
        self._closed = False
        broker.on_start.append(self._restarted)
        self._callbacks: list[Callable[[], None]] = []

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self.broker.up and not self._closed

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def reach(
        self,
        _worker_id: str,
        _command: WorkerCommand,
        _timeout_s: float,
        _others: Sequence[str] = (),
    ) -> bool:
        return False  # there is one broker

    def _restarted(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a reconnect callback failed")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.broker.on_start.remove(self._restarted)
        await self._transport.close()
