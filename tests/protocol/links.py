"""Bus as one process sees it: ``bus.memory`` through connections that can break."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from millrace.bus.api import Outbox, OutboxMessage, Results
from millrace.bus.control import Control
from millrace.bus.fleet.directory import WorkerDirectory
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import (
    IsForeignReply,
    JobQueue,
    LeasedJob,
    PublishedJob,
    QueueDepth,
    TenantQueue,
)
from millrace.bus.jobs.ends import JobRefusals
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.memory.jobs import MemoryJobQueue
from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.bus.storage import Storage
from millrace.bus.store.objects import Journal, Objects
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.schemas.control import WorkerCommand
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import DeadJob, Job, JobResult
from millrace.schemas.records import Record
from tests.protocol.network import FaultyTransport, Weather
from tests.protocol.processes import Process

T = TypeVar("T")

_LATENCIES_S = (0.000_3, 0.001, 0.005)


class Link:
    """Path of one process to a server and back, for confirmed messages."""

    def __init__(self, process: Process, clock: Clock, draw: random.Random) -> None:
        self.process = process
        self._clock = clock
        self._draw = draw

    async def call(self, kind: str, step: Callable[[], Awaitable[T]]) -> T:
        """Have the server do something. Raises BusUnavailableError, perhaps though it was done."""
        process = self.process
        await process.passes(kind, is_after=False)
        await self._travel()
        result = await step()
        await process.passes(kind, is_after=True)
        await self._travel()
        await process.running()
        return result

    async def tell(self, kind: str, step: Callable[[], Awaitable[None]]) -> None:
        """Have the server do something, of which nothing is heard."""
        await self.process.passes(kind, is_after=False)
        if not self.process.is_cut:
            await step()

    async def _travel(self) -> None:
        await self._clock.sleep(self._draw.choice(_LATENCIES_S))
        if self.process.is_cut:
            raise BusUnavailableError("The message bus cannot be reached. Try again later.")


class FaultyJobs:
    """See ``bus.job_queue.JobQueue``."""

    def __init__(self, inner: MemoryJobQueue, link: Link) -> None:
        self._inner = inner
        self._link = link

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        return await self._link.call("publish", lambda: self._inner.publish(job, reserved=reserved))

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        return await self._link.call(
            "pull", lambda: self._inner.pull(tenant_queue, max_jobs, timeout_s)
        )

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        return await self._inner.watch(on_published)

    def guard_replies(self, is_foreign: IsForeignReply) -> None:
        self._inner.guard_replies(is_foreign)

    async def recover_dropped(self) -> Subscription:
        return await self._inner.recover_dropped()

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        return await self._link.call("lines", self._inner.tenant_queues)

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        return await self._link.call(
            "forget", lambda: self._inner.forget_tenant_queue(tenant_queue)
        )

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth:
        return await self._link.call("depth", lambda: self._inner.depth(tenant_queue))

    async def is_open(self, stream_sequence: int) -> bool:
        return await self._link.call("is_open", lambda: self._inner.is_open(stream_sequence))

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        return await self._link.call("shed", lambda: self._inner.shed_newest(tenant_queue, count))

    async def extend(self, lease: str) -> None:
        await self._link.tell("extend", lambda: self._inner.extend(lease))

    async def ack(self, lease: str) -> None:
        await self._link.call("ack", lambda: self._inner.ack(lease))

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        await self._link.tell("release", lambda: self._inner.release(lease, delay_s))

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        await self._link.call("dead_letter", lambda: self._inner.dead_letter(dead, lease))


class FaultyOutbox:
    """See ``bus.api.Outbox``."""

    def __init__(self, bus: MemoryBus, link: Link) -> None:
        self._inner = bus.outbox
        self._link = link

    async def publish(self, record: Record, linger_s: float = 0.0) -> None:
        await self._link.call("record", lambda: self._inner.publish(record, linger_s))

    async def pull(self, max_records: int, timeout_s: float) -> list[OutboxMessage]:
        return await self._link.call("bridge", lambda: self._inner.pull(max_records, timeout_s))

    async def ack(self, messages: Sequence[OutboxMessage]) -> None:
        await self._link.call("bridge", lambda: self._inner.ack(messages))

    async def rewind(self, sequence: int) -> None:
        await self._link.call("bridge", lambda: self._inner.rewind(sequence))

    async def last_sequence(self) -> int:
        return await self._link.call("bridge", self._inner.last_sequence)

    async def num_waiting(self) -> int:
        return await self._link.call("bridge", self._inner.num_waiting)


class FaultyResults:
    """See ``bus.api.Results``."""

    def __init__(self, bus: MemoryBus, link: Link) -> None:
        self._inner = bus.results
        self._link = link

    async def store(self, result: JobResult) -> None:
        await self._link.call("result", lambda: self._inner.store(result))

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None:
        return await self._link.call("fetch", lambda: self._inner.fetch(tenant, request_id))

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        return await self._inner.watch(tenant, on_stored)


class FaultyBucket:
    """See ``bus.fleet.directory.WorkerBucket``."""

    def __init__(self, broker: MemoryBroker, link: Link) -> None:
        self._inner = broker.workers
        self._link = link

    async def put(self, subject: str, payload: bytes) -> None:
        await self._link.tell("bucket", lambda: self._inner.put(subject, payload))

    async def entries(self) -> Sequence[bytes]:
        return await self._link.call("entries", self._inner.entries)

    async def ages(self) -> Sequence[tuple[bytes, float]]:
        return await self._link.call("entries", self._inner.ages)

    async def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        return await self._link.call(
            "bucket", lambda: self._inner.put_after(subject, payload, after)
        )

    async def get(self, subject: str) -> tuple[bytes, int] | None:
        return await self._link.call("bucket", lambda: self._inner.get(subject))


class FaultyBus:
    """See ``bus.api.Bus``: one process's."""

    def __init__(
        self,
        broker: MemoryBroker,
        process: Process,
        clock: Clock,
        weather: Weather,
        draw: random.Random,
    ) -> None:
        self._broker = broker
        self._process = process
        inner = MemoryBus(broker)
        link = Link(process, clock, draw)
        transport = FaultyTransport(broker, process, clock, weather, draw)
        self.frames = FrameStreams(transport)
        self.control = Control(transport)
        self.workers = WorkerDirectory(transport, FaultyBucket(broker, link))
        self.results: Results = FaultyResults(inner, link)
        self.outbox: Outbox = FaultyOutbox(inner, link)
        self.journal: Journal = inner.journal
        self.objects: Objects = inner.objects
        self.storage: Storage = inner.storage
        refusals = JobRefusals(self.frames, self.results, self.outbox, clock)
        self.jobs: JobQueue = FaultyJobs(MemoryJobQueue(broker, transport, refusals), link)
        broker.on_start.append(self._restarted)

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._broker.up and not self._process.is_cut

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._process.on_mended.append(callback)

    async def reach(
        self,
        _worker_id: str,
        _command: WorkerCommand,
        _timeout_s: float,
        _others: Sequence[str] = (),
    ) -> bool:
        return False  # there is one broker

    def _restarted(self) -> None:
        self._process.is_shaken = True
        for callback in self._process.on_mended:
            self._process.receive(callback)

    async def close(self) -> None:
        self._broker.on_start.remove(self._restarted)


class SharedIndex:
    """Fake of Redis. While it is unreachable, reads find nothing and writes are lost."""

    def __init__(self) -> None:
        self.is_away = self.was_away = False
        self.known: dict[str, RunningRequest] = {}
        self.claims: dict[str, JobClaim] = {}
        self.cancels: set[tuple[str, str]] = set()
        self.held: dict[str, dict[str, str]] = {}

    def lookup(self, request_id: str) -> RunningRequest | None:
        return None if self.is_away else self.known.get(request_id)

    def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int
    ) -> JobClaim | None:
        """Claim a request by the rule of ``bus.running_requests``."""
        first = self.claims.get(request_id)
        if self.is_away:
            return None
        if first is None and is_new and request_id in self.known:
            return JobClaim(sequence=0)
        if first is not None and first.sequence not in (mine.sequence, void_sequence):
            return first
        self.claims[request_id] = mine
        return None

    def write(self, request_id: str, entry: RunningRequest, lease: str) -> None:
        """Write an entry by the rule of ``bus.running_requests``."""
        known = self.known.get(request_id)
        if entry.epoch == 0 and request_id in self.claims:
            return
        if not self.is_away and not (known and (known.finished or known.epoch > entry.epoch)):
            self.known[request_id] = entry
            held = self.held.setdefault(entry.worker_id, {})
            held.pop(request_id, None)
            if lease:
                held[request_id] = lease

    def drop(self, request_id: str, worker_id: str) -> None:
        if not self.is_away:
            self.held.get(worker_id, {}).pop(request_id, None)


class IndexLink:
    """See ``workers.host.leases.Generations``: one process's."""

    def __init__(self, index: SharedIndex, process: Process, clock: Clock) -> None:
        self._index = index
        self._process = process
        self._clock = clock

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None:
        await self._write(request_id, worker_id, epoch, finished=False, lease=lease)

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        await self._write(request_id, worker_id, epoch, finished=True)

    async def drop(self, request_id: str, worker_id: str) -> None:
        await self._process.passes("index", is_after=False)
        await self._clock.sleep(_LATENCIES_S[0])
        self._index.drop(request_id, worker_id)

    async def held_by(self, worker_id: str) -> dict[str, str]:
        await self._process.running()
        await self._clock.sleep(_LATENCIES_S[0])
        held = {} if self._index.is_away else dict(self._index.held.get(worker_id, {}))
        await self._process.running()
        return held

    async def lookup(self, request_id: str) -> RunningRequest | None:
        await self._process.running()
        await self._clock.sleep(_LATENCIES_S[0])
        known = self._index.lookup(request_id)
        await self._process.running()
        return known

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        await self._process.passes("index", is_after=False)
        await self._clock.sleep(_LATENCIES_S[0])
        if not self._index.is_away:
            self._index.cancels.update((tenant, one) for one in request_ids)

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:
        await self._process.running()
        return not self._index.is_away and (tenant, request_id) in self._index.cancels

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:
        known = await self.lookup(request_id)
        claim = None if self._index.is_away else self._index.claims.get(request_id)
        if claim is None or claim.tenant != tenant:
            return None
        return known is not None and known.finished

    async def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int = 0
    ) -> JobClaim | None:
        await self._process.running()
        await self._clock.sleep(_LATENCIES_S[0])
        first = self._index.claim(request_id, mine, is_new=is_new, void_sequence=void_sequence)
        await self._process.running()
        return first

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        raise AssertionError(f"{request_id} names its model")

    async def settle_adapter(self, request_id: str, version: str) -> str:
        raise AssertionError(f"{request_id} has no adapter, such as {version}")

    async def _write(
        self, request_id: str, worker_id: str, epoch: int, *, finished: bool, lease: str = ""
    ) -> None:
        await self._process.passes("index", is_after=False)
        await self._clock.sleep(_LATENCIES_S[0])
        entry = RunningRequest(worker_id=worker_id, epoch=epoch, finished=finished)
        self._index.write(request_id, entry, lease)
