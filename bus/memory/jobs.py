"""Job queue on the in-memory broker."""

from __future__ import annotations

from collections.abc import Callable

from millrace.bus import codec, subjects
from millrace.bus.job_queue import IsForeignReply, LeasedJob, PublishedJob, QueueDepth, TenantQueue
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import JobDeadLetters, JobRefusals, QueuedMessage, watch_stored_jobs
from millrace.bus.jobs.published import encode_job
from millrace.bus.memory.broker import MemoryBroker
from millrace.bus.memory.queue import StoredJob, sequence_of
from millrace.bus.storage import NATS
from millrace.bus.subjects import token
from millrace.bus.transport import Subscription, Transport
from millrace.schemas.errors import MalformedMessageError, QueueFullError, StoreFullError
from millrace.schemas.jobs import DeadJob, Job

RETRY_AFTER_FULL_S = 5.0


class MemoryJobQueue:
    """Job queue in memory. See ``bus.job_queue.JobQueue``."""

    def __init__(self, broker: MemoryBroker, transport: Transport, refusals: JobRefusals) -> None:
        self._broker = broker
        self._transport = transport
        self._refusals = refusals
        self._dead_letters = JobDeadLetters(
            self._store_dead, refusals, broker.clock, broker.config.max_deliver
        )
        # By subject: the number of the server's start in which the tenant queue was opened, and the
        # newest job at that time.
        self._opened: dict[str, tuple[int, int]] = {}

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        payload = encode_job(job)
        subject = subjects.job(TenantQueue.of(job, reserved=reserved))
        return self.publish_raw(subject, payload, None, token(job.request_id))

    def publish_raw(
        self, subject: str, payload: bytes, content_type: str | None, message_id: str
    ) -> PublishedJob:
        """Store a message as another service would publish it."""
        broker = self._broker
        broker.require_fits(len(payload))
        broker.require_store(subjects.JOBS_STREAM)
        if not broker.admits_jobs:
            raise StoreFullError(NATS, "has no room")
        if broker.jobs.is_full and not broker.jobs.is_duplicate(message_id):
            raise QueueFullError("The queue is full. Try again later.", RETRY_AFTER_FULL_S)
        sequence, duplicate = broker.jobs.add(subject, payload, content_type, message_id)
        if not duplicate:
            broker.publish(subjects.stored_job(subject), b"")
        elif broker.num_recovering and not subjects.is_reserved(subject):
            kept = broker.jobs.find(sequence)
            if kept is None or (kept.subject, kept.payload) != (subject, payload):
                self.publish_raw(subject, payload, content_type, "")
        return PublishedJob(stream_sequence=sequence, duplicate=duplicate)

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        clock = self._broker.clock
        subject = subjects.job(tenant_queue)
        deadline_s = clock.monotonic() + timeout_s
        while True:
            taken = self._take(subject, max_jobs) if self._broker.up else []
            read = [await self._read(tenant_queue, job) for job in taken]
            leased = [one for one in read if one is not None]
            now_s = clock.monotonic()
            if leased or (now_s >= deadline_s and not taken):
                return leased
            due_s = self._broker.jobs.next_due_s(subject)
            until_s = deadline_s
            if self._broker.up and due_s is not None:
                until_s = min(deadline_s, due_s)
            if not taken:
                await self._broker.jobs.wait(subject, max(until_s - now_s, 0.0))

    def _take(self, subject: str, max_jobs: int) -> list[StoredJob]:
        num_starts, _ = self._opened.get(subject, (0, 0))
        if num_starts != self._broker.num_starts:
            self._opened[subject] = (self._broker.num_starts, self._broker.jobs.last_sequence)
        return self._broker.jobs.take(subject, max_jobs)

    async def _read(self, tenant_queue: TenantQueue, stored: StoredJob) -> LeasedJob | None:
        job = await self._dead_letters.read(_queued(stored), stored.stored_ns)
        if job is None:
            return None
        return LeasedJob(
            job=job,
            lease=stored.lease,
            num_deliveries=stored.num_deliveries,
            stream_sequence=stored.sequence,
            tenant_queue=tenant_queue,
            uncertain=stored.sequence <= self._opened[stored.subject][1],
            stored_ns=stored.stored_ns,
        )

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        return await watch_stored_jobs(self._transport, on_published)

    def guard_replies(self, is_foreign: IsForeignReply) -> None:
        self._refusals.is_foreign_reply = is_foreign

    async def recover_dropped(self) -> Subscription:
        return _Recovery(self._broker)

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        self._broker.require_up()
        tenant_queues: dict[TenantQueue, int] = {}
        for subject, count in self._broker.jobs.subjects().items():
            try:
                tenant_queues[subjects.tenant_queue_of(subject)] = count
            except ValueError:
                await self._refuse_misfits(subject)
        return tenant_queues

    async def _refuse_misfits(self, subject: str) -> None:
        """Refuse all messages of a subject that names no tenant queue: they cannot be pulled."""
        while (stored := self._broker.jobs.take_newest(subject)) is not None:
            error = MalformedMessageError(decoding.NOT_A_TENANT_QUEUE)
            await self._dead_letters.refuse_unreadable(_queued(stored), error)

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        self._broker.require_up()
        subject = subjects.job(tenant_queue)
        if not self._broker.jobs.forget(subject):
            return False
        self._opened.pop(subject, None)
        return True

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth:
        self._broker.require_up()
        return self._broker.jobs.depth(subjects.job(tenant_queue))

    async def is_open(self, stream_sequence: int) -> bool:
        self._broker.require_up()
        return self._broker.jobs.holds(stream_sequence)

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        self._broker.require_up()
        shed: list[Job] = []
        while len(shed) < count:
            stored = self._broker.jobs.take_newest(subjects.job(tenant_queue))
            if stored is None:
                break
            job = await self._dead_letters.read(_queued(stored), stored.stored_ns)
            if job is not None:
                shed.append(job)
        return shed

    async def extend(self, lease: str) -> None:
        if self._broker.up:
            self._broker.jobs.hold(lease, self._broker.config.ack_wait_s)

    async def ack(self, lease: str) -> None:
        self._broker.require_up()
        self._broker.jobs.remove(sequence_of(lease))

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        if self._broker.up:
            self._broker.jobs.hold(lease, delay_s)

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        self._broker.require_fits(len(codec.encode(dead)))
        self._broker.require_up()
        await self._store_dead(dead, sequence_of(lease))

    async def _store_dead(self, dead: DeadJob, sequence: int) -> None:
        """Move a job to the dead letters."""
        self._broker.dead.append(dead)
        self._broker.jobs.remove(sequence)


def _queued(stored: StoredJob) -> QueuedMessage:
    return QueuedMessage(
        stored.subject,
        stored.payload,
        stored.content_type,
        stored.sequence,
        stored.num_deliveries,
    )


class _Recovery:
    """Recovery of dropped jobs.

    See ``JobQueue.recover_dropped``. It is active until it is closed.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        broker.num_recovering += 1

    async def close(self) -> None:
        self._broker.num_recovering -= 1
