"""JobQueue on the in-memory broker."""

from __future__ import annotations

import logging

from bus import codec, intake, subjects
from bus.api import LeasedJob, PublishedJob, QueueDepth
from bus.memory.broker import MemoryBroker
from bus.memory.queue import StoredJob
from bus.refusals import Refusals
from schemas.errors import MalformedMessageError, QueueFullError
from schemas.jobs import DeadJob, Job

logger = logging.getLogger(__name__)

RETRY_AFTER_FULL_S = 5.0


class MemoryJobQueue:
    """See ``bus.api.JobQueue``."""

    def __init__(self, broker: MemoryBroker, refusals: Refusals) -> None:
        self._broker = broker
        self._refusals = refusals

    async def publish(self, job: Job) -> PublishedJob:
        payload = codec.encode(job)
        subject = subjects.job(job.model, job.tier)
        return self.publish_raw(subject, payload, None, subjects.token(job.request_id))

    def publish_raw(
        self, subject: str, payload: bytes, content_type: str | None, message_id: str
    ) -> PublishedJob:
        """Store a message as another service would publish it."""
        broker = self._broker
        broker.require_fits(len(payload))
        broker.require_up()
        if broker.jobs.is_full and not broker.jobs.is_duplicate(message_id):
            raise QueueFullError("The queue is full. Try again later.", RETRY_AFTER_FULL_S)
        sequence, duplicate = broker.jobs.add(subject, payload, content_type, message_id)
        return PublishedJob(stream_sequence=sequence, duplicate=duplicate)

    async def pull(self, model: str, max_jobs: int, timeout_s: float) -> list[LeasedJob]:
        clock = self._broker.clock
        deadline_s = clock.monotonic() + timeout_s
        while True:
            taken = self._broker.jobs.take(model, max_jobs) if self._broker.up else []
            leased = [one for one in [await self._read(job) for job in taken] if one is not None]
            now_s = clock.monotonic()
            if leased or (now_s >= deadline_s and not taken):
                return leased
            due_s = self._broker.jobs.next_due_s(model)
            until_s = deadline_s
            if self._broker.up and due_s is not None:
                until_s = min(deadline_s, due_s)
            if not taken:
                await self._broker.jobs.wait(max(until_s - now_s, 0.0))

    async def _read(self, stored: StoredJob) -> LeasedJob | None:
        try:
            job = intake.read_job(
                stored.subject, stored.payload, stored.content_type, stored.stored_ns
            )
        except MalformedMessageError as error:
            self._bury_stored(stored, intake.MALFORMED, error.message)
            await self._refusals.refuse_unreadable(
                stored.payload, stored.content_type, error.code, error.message
            )
            return None
        if stored.num_deliveries > self._broker.config.max_deliver:
            message = f"The job was delivered {stored.num_deliveries - 1} times without an answer."
            self._bury_stored(stored, intake.TOO_MANY_DELIVERIES, message, job.request_id)
            await self._refusals.refuse(
                job, intake.TOO_MANY_DELIVERIES, message, stored.num_deliveries
            )
            return None
        return LeasedJob(
            job=job,
            lease=stored.lease,
            num_deliveries=stored.num_deliveries,
            stream_sequence=stored.sequence,
        )

    def _bury_stored(
        self, stored: StoredJob, reason: str, message: str, request_id: str = ""
    ) -> None:
        logger.warning(
            "a job goes to the dead letters",
            extra={"reason": reason, "subject": stored.subject, "sequence": stored.sequence},
        )
        self._broker.dead.append(
            DeadJob(
                reason=reason,
                message=message,
                subject=stored.subject,
                payload=stored.payload,
                request_id=request_id,
                num_deliveries=stored.num_deliveries,
                died_ns=self._broker.clock.now_ns(),
            )
        )
        self._broker.jobs.remove(stored.lease)

    async def depth(self, model: str) -> QueueDepth:
        self._broker.require_up()
        return self._broker.jobs.depth(model)

    async def is_open(self, stream_sequence: int) -> bool:
        self._broker.require_up()
        return self._broker.jobs.holds(stream_sequence)

    async def waiting_models(self) -> list[str]:
        self._broker.require_up()
        return self._broker.jobs.models()

    async def shed_newest(self, model: str, count: int) -> list[Job]:
        self._broker.require_up()
        shed: list[Job] = []
        while len(shed) < count:
            stored = self._broker.jobs.take_newest(model)
            if stored is None:
                break
            try:
                job = intake.read_job(
                    stored.subject, stored.payload, stored.content_type, stored.stored_ns
                )
            except MalformedMessageError as error:
                self._bury_stored(stored, intake.MALFORMED, error.message)
                await self._refusals.refuse_unreadable(
                    stored.payload, stored.content_type, error.code, error.message
                )
                continue
            shed.append(job)
        return shed

    async def extend(self, lease: str) -> None:
        if self._broker.up:
            self._broker.jobs.hold(lease, self._broker.config.ack_wait_s)

    async def ack(self, lease: str) -> None:
        self._broker.require_up()
        self._broker.jobs.remove(lease)

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        if self._broker.up:
            self._broker.jobs.hold(lease, delay_s)

    async def bury(self, dead: DeadJob, lease: str) -> None:
        self._broker.require_fits(len(codec.encode(dead)))
        self._broker.require_up()
        self._broker.dead.append(dead)
        self._broker.jobs.remove(lease)
