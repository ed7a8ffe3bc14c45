"""Messages of the work queue that are given up on: stored with why, and their owners told."""

from __future__ import annotations

import logging

import msgspec

from bus import codec, subjects
from bus.codec import CONTENT_TYPE
from bus.jobs import decoding
from bus.jobs.refusals import Refusals
from bus.nats import jetstream
from bus.nats.connection import MESSAGE_ID, Connection
from bus.nats.jetstream import RawMessage
from bus.nats.leases import Delivery
from runtime.clock import Clock
from schemas.errors import MalformedMessageError, PayloadTooLargeError
from schemas.jobs import DeadJob, Job

logger = logging.getLogger(__name__)


class JobDeadLetters:
    """Moves messages to the stream ``DEAD``; to take them out of the queue is left to the caller,
    after that."""

    def __init__(self, connection: Connection, refusals: Refusals, clock: Clock) -> None:
        self._connection = connection
        self._refusals = refusals
        self._clock = clock

    async def store(self, dead: DeadJob, sequence: int) -> None:
        """``sequence`` is the job's in its queue: it is stored once. Raises BusUnavailableError."""
        subject = subjects.dead_job(dead.reason)
        headers = {MESSAGE_ID: f"{sequence}:{subjects.token(dead.reason)}"}
        try:
            await jetstream.store(self._connection, subject, codec.encode(dead), headers)
        except PayloadTooLargeError:
            # The job filled a message by itself; its envelope does not fit with it.
            note = f"{dead.message} (the payload of {len(dead.payload)} bytes is not kept)"
            smaller = msgspec.structs.replace(dead, payload=b"", message=note)
            await jetstream.store(self._connection, subject, codec.encode(smaller), headers)

    async def refuse_unreadable(
        self,
        subject: str,
        payload: bytes,
        content_type: str | None,
        error: MalformedMessageError,
        delivery: Delivery,
    ) -> None:
        """For a message that is not a job, whose publisher is told as far as it can be made out."""
        owner = decoding.read_owner(subject, payload, content_type)
        dead = DeadJob(
            reason=decoding.MALFORMED,
            message=error.message,
            subject=subject,
            payload=payload,
            request_id=owner.request_id,
            num_deliveries=delivery.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        await self._log_and_store(dead, delivery)
        await self._refusals.refuse_unreadable(subject, payload, content_type, error)

    async def refuse_worn_out(
        self, job: Job, subject: str, payload: bytes, delivery: Delivery
    ) -> None:
        """For a job that was delivered too often."""
        dead = DeadJob(
            reason=decoding.TOO_MANY_DELIVERIES,
            message=f"The job was delivered {delivery.num_deliveries - 1} times without an answer.",
            subject=subject,
            payload=payload,
            request_id=job.request_id,
            num_deliveries=delivery.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        await self._log_and_store(dead, delivery)
        await self._refusals.refuse(job, dead.reason, dead.message, delivery.num_deliveries)

    async def refuse_misfits(self, subject: str, max_messages: int) -> int:
        """Empty a subject that names no tenant queue, which nobody can pull from; how many messages
        it had, up to ``max_messages``. Whoever deletes one tells its publisher."""
        stream = subjects.JOBS_STREAM
        for num_done in range(max_messages):
            message = await jetstream.newest(self._connection, stream, subject)
            if message is None:
                return num_done
            await self._refuse_misfit(message)
        return max_messages

    async def _refuse_misfit(self, message: RawMessage) -> None:
        content_type = message.header(CONTENT_TYPE)
        owner = decoding.read_owner(message.subject, message.payload, content_type)
        dead = DeadJob(
            reason=decoding.MALFORMED,
            message=decoding.NOT_A_TENANT_QUEUE,
            subject=message.subject,
            payload=message.payload,
            request_id=owner.request_id,
            died_ns=self._clock.now_ns(),
        )
        await self._log_and_store(dead, Delivery(0, message.seq, jetstream.epoch_ns(message.time)))
        if await jetstream.delete(self._connection, subjects.JOBS_STREAM, message.seq):
            await self._refusals.refuse_unreadable(
                message.subject,
                message.payload,
                content_type,
                MalformedMessageError(decoding.NOT_A_TENANT_QUEUE),
            )

    async def _log_and_store(self, dead: DeadJob, delivery: Delivery) -> None:
        logger.warning(
            "a job goes to the dead letters",
            extra={
                "reason": dead.reason,
                "subject": dead.subject,
                "sequence": delivery.stream_sequence,
            },
        )
        await self.store(dead, delivery.stream_sequence)
