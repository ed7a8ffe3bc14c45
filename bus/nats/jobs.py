"""The work queue on JetStream."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime

import msgspec
from nats.aio.msg import Msg

from bus import codec, intake, subjects
from bus.api import LeasedJob, PublishedJob, QueueDepth
from bus.clock import Clock
from bus.codec import CONTENT_TYPE
from bus.nats import jetstream, shedding, topology
from bus.nats.connection import MESSAGE_ID, NAK, Connection, NoAnswerError
from bus.nats.jetstream import JetStreamError, nanoseconds
from bus.nats.leases import Delivery, read_lease
from bus.nats.puller import Puller
from bus.refusals import Refusals
from schemas.config import NatsConfig
from schemas.errors import (
    BusUnavailableError,
    MalformedMessageError,
    PayloadTooLargeError,
    QueueFullError,
)
from schemas.jobs import DeadJob, Job

logger = logging.getLogger(__name__)

RETRY_AFTER_FULL_S = 5.0

_ACK = b"+ACK"
_IN_PROGRESS = b"+WPI"
_ACK_TIMEOUT_S = 1.0
_ACK_ATTEMPTS = 2


class NatsJobQueue:
    """See ``bus.api.JobQueue``."""

    def __init__(
        self, connection: Connection, config: NatsConfig, refusals: Refusals, clock: Clock
    ) -> None:
        self._connection = connection
        self._config = config
        self._refusals = refusals
        self._clock = clock
        self._pullers: dict[str, Puller] = {}
        self._shedding: dict[str, asyncio.Lock] = {}

    # --- in ---

    async def publish(self, job: Job) -> PublishedJob:
        headers = {MESSAGE_ID: subjects.token(job.request_id)}
        subject = subjects.job(job.model, job.tier)
        try:
            stored = await jetstream.store(self._connection, subject, codec.encode(job), headers)
        except JetStreamError as error:
            if error.number == jetstream.FULL:
                raise QueueFullError(
                    "The queue is full. Try again later.", RETRY_AFTER_FULL_S
                ) from error
            raise jetstream.unexpected(error) from error
        return PublishedJob(stream_sequence=stored.seq, duplicate=stored.duplicate)

    # --- out ---

    async def pull(self, model: str, max_jobs: int, timeout_s: float) -> list[LeasedJob]:
        loop_deadline_s = self._clock.monotonic() + timeout_s
        while True:
            left_s = loop_deadline_s - self._clock.monotonic()
            messages = await self._puller(model).pull(max_jobs, left_s)
            read = [await self._read(message) for message in messages]
            leased = [one for one in read if one is not None]
            if leased or not messages:
                return leased

    def _puller(self, model: str) -> Puller:
        puller = self._pullers.get(model)
        if puller is None:
            puller = Puller(
                self._connection,
                subjects.JOBS_STREAM,
                subjects.jobs_consumer(model),
                lambda: topology.ensure_jobs_consumer(self._connection, self._config, model),
            )
            self._pullers[model] = puller
        return puller

    async def _read(self, message: Msg) -> LeasedJob | None:
        delivery = read_lease(message.reply)
        content_type = message.headers.get(CONTENT_TYPE) if message.headers else None
        try:
            job = intake.read_job(message.subject, message.data, content_type, delivery.stored_ns)
        except MalformedMessageError as error:
            await self._refuse_unreadable(
                message.subject, message.data, content_type, error.message, delivery
            )
            await self._forget(message.reply)
            return None
        if delivery.num_deliveries <= self._config.max_deliver:
            return LeasedJob(
                job=job,
                lease=message.reply,
                num_deliveries=delivery.num_deliveries,
                stream_sequence=delivery.stream_sequence,
            )
        await self._refuse_worn_out(job, message, delivery)
        return None

    # --- depth and shedding ---

    async def depth(self, model: str) -> QueueDepth:
        info = await self._info(model)
        return QueueDepth(num_queued=info.num_pending, num_leased=info.num_ack_pending)

    async def is_open(self, stream_sequence: int) -> bool:
        try:
            return await jetstream.exists(self._connection, subjects.JOBS_STREAM, stream_sequence)
        except JetStreamError as error:
            raise jetstream.unexpected(error) from error

    async def waiting_models(self) -> list[str]:
        try:
            found = await jetstream.subjects_in(
                self._connection, subjects.JOBS_STREAM, subjects.ALL_JOBS
            )
        except JetStreamError as error:
            raise jetstream.unexpected(error) from error
        return sorted(subjects.models_of(found))

    async def _info(self, model: str) -> jetstream.ConsumerInfo:
        puller = self._puller(model)
        await puller.ensure()
        name = subjects.jobs_consumer(model)
        try:
            return await jetstream.consumer_info(self._connection, subjects.JOBS_STREAM, name)
        except JetStreamError as error:
            raise jetstream.unexpected(error) from error

    async def shed_newest(self, model: str, count: int) -> list[Job]:
        await self._puller(model).ensure()
        async with self._shedding.setdefault(model, asyncio.Lock()):
            try:
                taken = await shedding.take_newest(self._connection, model, count)
            except JetStreamError as error:
                raise jetstream.unexpected(error) from error
        shed: list[Job] = []
        for message in taken:
            content_type = message.header(CONTENT_TYPE)
            stored_ns = _epoch_ns(message.time)
            try:
                job = intake.read_job(message.subject, message.payload, content_type, stored_ns)
            except MalformedMessageError as error:
                await self._refuse_unreadable(
                    message.subject,
                    message.payload,
                    content_type,
                    error.message,
                    Delivery(0, message.seq, stored_ns),
                )
                continue
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
                logger.info("an ack is repeated", extra={"cause": str(error)})
            else:
                return
        # Its consumer may be gone, or the server: the message itself must go.
        try:
            await jetstream.delete(self._connection, subjects.JOBS_STREAM, sequence)
        except JetStreamError as error:
            raise jetstream.unexpected(error) from error

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        delay = msgspec.json.encode({"delay": nanoseconds(delay_s)})
        await self._connection.publish(lease, NAK + b" " + delay if delay_s > 0 else NAK)

    # --- dead letters ---

    async def bury(self, dead: DeadJob, lease: str) -> None:
        await self._store_dead(dead, read_lease(lease).stream_sequence)
        await self.ack(lease)

    async def _store_dead(self, dead: DeadJob, sequence: int) -> None:
        subject = subjects.dead_job(dead.reason)
        headers = {MESSAGE_ID: f"{sequence}:{subjects.token(dead.reason)}"}
        try:
            payload = codec.encode(dead)
            try:
                await jetstream.store(self._connection, subject, payload, headers)
            except PayloadTooLargeError:
                # The job filled a message by itself; its envelope does not fit with it.
                note = f"{dead.message} (the payload of {len(dead.payload)} bytes is not kept)"
                smaller = msgspec.structs.replace(dead, payload=b"", message=note)
                await jetstream.store(self._connection, subject, codec.encode(smaller), headers)
        except JetStreamError as error:
            raise jetstream.unexpected(error) from error

    async def _refuse_unreadable(
        self,
        subject: str,
        payload: bytes,
        content_type: str | None,
        cause: str,
        delivery: Delivery,
    ) -> None:
        dead = DeadJob(
            reason=intake.MALFORMED,
            message=cause,
            subject=subject,
            payload=payload,
            request_id=intake.read_owner(payload, content_type).request_id,
            num_deliveries=delivery.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        self._log_dead(dead, delivery)
        await self._store_dead(dead, delivery.stream_sequence)
        await self._refusals.refuse_unreadable(
            payload, content_type, MalformedMessageError.code, cause
        )

    async def _refuse_worn_out(self, job: Job, message: Msg, delivery: Delivery) -> None:
        held = delivery.num_deliveries - 1
        dead = DeadJob(
            reason=intake.TOO_MANY_DELIVERIES,
            message=f"The job was delivered {held} times without an answer.",
            subject=message.subject,
            payload=message.data,
            request_id=job.request_id,
            num_deliveries=delivery.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        self._log_dead(dead, delivery)
        await self._store_dead(dead, delivery.stream_sequence)
        await self._refusals.refuse(job, dead.reason, dead.message, delivery.num_deliveries)
        await self._forget(message.reply)

    def _log_dead(self, dead: DeadJob, delivery: Delivery) -> None:
        logger.warning(
            "a job goes to the dead letters",
            extra={
                "reason": dead.reason,
                "subject": dead.subject,
                "sequence": delivery.stream_sequence,
            },
        )

    async def _forget(self, lease: str) -> None:
        """Ack a buried message; if the server is away just now, it is buried again later."""
        try:
            await self.ack(lease)
        except BusUnavailableError:
            logger.warning("a dead job stays in the queue until the server is back")


def _epoch_ns(timestamp: str) -> int:
    """UTC epoch of an RFC 3339 time; finer than microseconds is cut."""
    whole = datetime.fromisoformat(timestamp)
    return round(whole.timestamp() * 1_000_000) * 1_000
