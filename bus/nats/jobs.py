"""Job queue on JetStream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from millrace.bus import codec, subjects
from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.job_queue import IsForeignReply, LeasedJob, PublishedJob, QueueDepth, TenantQueue
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import JobDeadLetters, JobRefusals, QueuedMessage, watch_stored_jobs
from millrace.bus.jobs.published import encode_job
from millrace.bus.nats import jetstream, shedding, topology
from millrace.bus.nats.connection import MESSAGE_ID, NAK, Connection, NoAnswerError
from millrace.bus.nats.dropped_jobs import DroppedJobs
from millrace.bus.nats.jetstream import JetStreamError, RawMessage, nanoseconds
from millrace.bus.nats.puller import ConsumerPuller, PullInbox, read_lease
from millrace.bus.subjects import token
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.runtime.tracing import HEADER as TRACEPARENT
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import (
    BusUnavailableError,
    MalformedMessageError,
    PayloadTooLargeError,
    QueueFullError,
)
from millrace.schemas.jobs import DeadJob, Job

logger = logging.getLogger(__name__)

RETRY_AFTER_FULL_S = 5.0

_ACK = b"+ACK"
_IN_PROGRESS = b"+WPI"
_ACK_TIMEOUT_S = 1.0
_ACK_ATTEMPTS = 2
_MAX_MISFITS = 64
# Tolerance for comparing server times, of which one is truncated to microseconds.
_SAME_TIME_NS = 1_000


class _OpenQueue:
    """Tenant queue that this process has pulled from.

    A server that is killed loses its last deliveries, and a new consumer knows of none. Either
    happens before this process opens the tenant queue, or reopens it after a loss of its
    connection. So later messages are certainly delivered for the first time.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: PullInbox,
        config: NatsConfig,
        tenant_queue: TenantQueue,
    ) -> None:
        self.tenant_queue = tenant_queue
        self.shedding = asyncio.Lock()
        self.puller = ConsumerPuller(
            connection,
            inbox,
            subjects.JOBS_STREAM,
            subjects.jobs_consumer(tenant_queue),
            self._ensure,
        )
        self._connection = connection
        self._config = config
        self._opened_ns = 0

    async def _ensure(self) -> None:
        self._opened_ns = await topology.ensure_jobs_consumer(
            self._connection, self._config, self.tenant_queue
        )

    def may_have_been_held(self, stored_ns: int) -> bool:
        """Return whether a message may have been delivered before without being counted."""
        return stored_ns <= self._opened_ns + _SAME_TIME_NS


class NatsJobQueue:
    """Job queue on NATS. See ``bus.job_queue.JobQueue``."""

    def __init__(
        self,
        connection: Connection,
        inbox: PullInbox,
        config: NatsConfig,
        refusals: JobRefusals,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._config = config
        self._clock = clock
        self._refusals = refusals
        self._dead_letters = JobDeadLetters(self._store_dead, refusals, clock, config.max_deliver)
        self._open_queues: dict[TenantQueue, _OpenQueue] = {}

    # --- publishing ---

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        headers = {MESSAGE_ID: token(job.request_id)}
        subject = subjects.job(TenantQueue.of(job, reserved=reserved))
        try:
            stored = await jetstream.store(self._connection, subject, encode_job(job), headers)
        except JetStreamError as error:
            if error.number == jetstream.FULL:
                raise QueueFullError(
                    "The queue is full. Try again later.", RETRY_AFTER_FULL_S
                ) from error
            raise
        return PublishedJob(stream_sequence=stored.seq, duplicate=stored.duplicate)

    # --- pulling ---

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        open_queue = self._opened(tenant_queue)
        deadline_s = self._clock.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            messages = await open_queue.puller.pull(max_jobs, left_s)
            leased: list[LeasedJob] = []
            for message in messages:
                job = await self._read(open_queue, message)
                if job is not None:
                    leased.append(job)
            if leased or not messages:
                return leased
            left_s = deadline_s - self._clock.monotonic()

    def _opened(self, tenant_queue: TenantQueue) -> _OpenQueue:
        open_queue = self._open_queues.get(tenant_queue)
        if open_queue is None:
            open_queue = _OpenQueue(self._connection, self._inbox, self._config, tenant_queue)
            self._open_queues[tenant_queue] = open_queue
        return open_queue

    async def _read(self, open_queue: _OpenQueue, message: Msg) -> LeasedJob | None:
        delivery = read_lease(message.reply)
        headers = message.headers or {}
        queued = QueuedMessage(
            message.subject,
            message.data,
            headers.get(CONTENT_TYPE),
            delivery.stream_sequence,
            delivery.num_deliveries,
        )
        traceparent = headers.get(TRACEPARENT)
        job = await self._dead_letters.read(queued, delivery.stored_ns, traceparent)
        if job is None:
            await self._forget(message.reply)
            return None
        return LeasedJob(
            job=job,
            lease=message.reply,
            num_deliveries=delivery.num_deliveries,
            stream_sequence=delivery.stream_sequence,
            tenant_queue=open_queue.tenant_queue,
            uncertain=open_queue.may_have_been_held(delivery.stored_ns),
            stored_ns=delivery.stored_ns,
        )

    async def _forget(self, lease: str) -> None:
        """Ack a dead-lettered message.

        If the server is unreachable, it is dead-lettered again later.
        """
        try:
            await self.ack(lease)
        except BusUnavailableError:
            logger.warning("a dead job stays in the queue until NATS is reachable again")

    # --- tenant queues ---

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        return await watch_stored_jobs(self._connection, on_published)

    def guard_replies(self, is_foreign: IsForeignReply) -> None:
        self._refusals.is_foreign_reply = is_foreign

    async def recover_dropped(self) -> Subscription:
        dropped = DroppedJobs(self._connection, self._clock)
        try:
            await dropped.open()
        except BaseException:
            await dropped.close()
            raise
        return dropped

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        tenant_queues: dict[TenantQueue, int] = {}
        num_misfits = 0
        stored = await jetstream.subjects_in(
            self._connection, subjects.JOBS_STREAM, subjects.ANY_JOB
        )
        for subject, count in stored.items():
            try:
                tenant_queues[subjects.tenant_queue_of(subject)] = count
            except ValueError:
                num_misfits += await self._refuse_misfits(subject, _MAX_MISFITS - num_misfits)
        return tenant_queues

    async def _refuse_misfits(self, subject: str, max_messages: int) -> int:
        """Remove the messages of a subject that names no tenant queue, as no pull reaches them.

        The process that deletes a message tells its publisher. Returns the number of messages, up
        to ``max_messages``.
        """
        stream = subjects.JOBS_STREAM
        error = MalformedMessageError(decoding.NOT_A_TENANT_QUEUE)
        for num_done in range(max_messages):
            message = await jetstream.newest(self._connection, stream, subject)
            if message is None:
                return num_done
            queued = _queued(message)
            await self._dead_letters.keep_unreadable(queued, error)
            if await jetstream.delete(self._connection, stream, message.seq):
                await self._refusals.refuse_unreadable(
                    subject, queued.payload, queued.content_type, error
                )
        return max_messages

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        has_consumer = await shedding.remove_idle(self._connection, tenant_queue)
        if has_consumer or await self._count(tenant_queue):
            return False
        self._open_queues.pop(tenant_queue, None)
        return True

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth:
        stream, consumer = subjects.JOBS_STREAM, subjects.jobs_consumer(tenant_queue)
        info = await jetstream.find_consumer(self._connection, stream, consumer)
        if info is not None:
            return QueueDepth(num_queued=info.num_pending, num_leased=info.num_ack_pending)
        return QueueDepth(num_queued=await self._count(tenant_queue), num_leased=0)

    async def _count(self, tenant_queue: TenantQueue) -> int:
        """Return the number of a tenant queue's jobs in the stream."""
        subject = subjects.job(tenant_queue)
        found = await jetstream.subjects_in(self._connection, subjects.JOBS_STREAM, subject)
        return found.get(subject, 0)

    async def is_open(self, stream_sequence: int) -> bool:
        return await jetstream.exists(self._connection, subjects.JOBS_STREAM, stream_sequence)

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        open_queue = self._opened(tenant_queue)
        await open_queue.puller.ensure()
        async with open_queue.shedding:
            try:
                taken = await shedding.take_newest(self._connection, tenant_queue, count)
            except JetStreamError as error:
                if error.number != jetstream.CONSUMER_NOT_FOUND:
                    raise
                return []  # the tenant queue was just forgotten, so it is empty
        shed: list[Job] = []
        for message in taken:
            stored_ns = jetstream.epoch_ns(message.time)
            job = await self._dead_letters.read(_queued(message), stored_ns)
            if job is not None:
                shed.append(job)
        return shed

    # --- leases ---

    async def extend(self, lease: str) -> None:
        await self._connection.publish(lease, _IN_PROGRESS)

    async def ack(self, lease: str) -> None:
        sequence = read_lease(lease).stream_sequence
        for _ in range(_ACK_ATTEMPTS):
            if not await self._connection.wait_connected(self._config.connect_timeout_s):
                break
            try:
                await self._connection.request_once(lease, _ACK, _ACK_TIMEOUT_S)
            except NoAnswerError as error:
                logger.info("repeating an ack", extra={"cause": str(error)})
            else:
                return
        # The consumer or the server may be gone, so delete the message itself.
        await jetstream.delete(self._connection, subjects.JOBS_STREAM, sequence)

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        delay = msgspec.json.encode({"delay": nanoseconds(delay_s)})
        await self._connection.publish(lease, NAK + b" " + delay if delay_s > 0 else NAK)

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        await self._store_dead(dead, read_lease(lease).stream_sequence)
        await self.ack(lease)

    async def _store_dead(self, dead: DeadJob, sequence: int) -> None:
        """Store a dead letter, once for a job's ``sequence``. Raises BusUnavailableError."""
        subject = subjects.dead_job(dead.reason)
        headers = {MESSAGE_ID: f"{sequence}:{token(dead.reason)}"}
        try:
            await self._store_letter(subject, dead, headers)
        except PayloadTooLargeError:
            # The job alone filled a message, so its envelope does not fit.
            note = f"{dead.message} (the payload of {len(dead.payload)} bytes is not kept)"
            smaller = msgspec.structs.replace(dead, payload=b"", message=note)
            await self._store_letter(subject, smaller, headers)

    async def _store_letter(self, subject: str, dead: DeadJob, headers: dict[str, str]) -> None:
        """Store a dead letter in the encoding of the job's publisher."""
        payload, more = codec.encoded(dead, as_json=codec.is_json(dead.content_type))
        await jetstream.store(self._connection, subject, payload, {**headers, **(more or {})})


def _queued(message: RawMessage) -> QueuedMessage:
    return QueuedMessage(
        message.subject, message.payload, message.header(CONTENT_TYPE), message.seq
    )
