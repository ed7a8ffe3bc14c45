"""Ends of jobs without a worker: record, result, frame for the owner, dead letter."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from millrace.bus import codec, subjects
from millrace.bus.api import Outbox, Results
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import IsForeignReply, TenantQueue
from millrace.bus.jobs import decoding
from millrace.bus.jobs.decoding import Owner
from millrace.bus.transport import Message, Subscription, Transport
from millrace.runtime.clock import Clock
from millrace.runtime.json.tolerant import without_mark
from millrace.runtime.tracing import recorded_trace_id
from millrace.schemas.control import EPOCHS_PER_DELIVERY
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import DeadJob, Job, JobResult, RequestPart, asked_of
from millrace.schemas.records import MAX_RECORD_TIME_NS, RequestRecord, Status
from millrace.schemas.tenants import may_reply_to

logger = logging.getLogger(__name__)

_NS_PER_MS = 1e6
# A refused job may ask for more.
_MOST_TOKENS = (1 << 32) - 1


_ID_IS_FREE = "Its request_id is free: a corrected job may use it."


def record_of(job: Job, status: Status, error_code: str, epoch: int, done_ns: int) -> RequestRecord:
    """Make the record of a job that no worker answered: no completion tokens, no cost.

    A worker adds its data. A part of a request counts no prompt tokens unless a worker has computed
    them, so tokens and cost of the request's parts add up.
    """
    asked = asked_of(job)
    part = job.part or RequestPart(request_id="")
    return RequestRecord(
        request_id=job.request_id,
        tenant=job.tenant,
        user=job.user,
        session_id=job.session_id,
        source=job.source,
        tier=job.tier,
        model_requested=job.model_requested or job.model,
        model_served=job.model,
        route_reason=job.route_reason,
        prompt_tokens=len(job.prompt_token_ids or ()) if job.part is None else 0,
        total_ms=max(done_ns - job.received_ns, 0) / _NS_PER_MS,
        status=status,
        error_code=error_code,
        received_ns=job.received_ns,
        done_ns=done_ns,
        epoch=epoch,
        trace_id=recorded_trace_id(job.traceparent),
        key_id=job.key_id,
        metadata=job.metadata,
        adapter=job.adapter,
        api=asked.api,
        stream=asked.stream,
        max_tokens=None if asked.max_tokens is None else min(asked.max_tokens, _MOST_TOKENS),
        deadline_ns=min(job.deadline_ns or 0, MAX_RECORD_TIME_NS),
        parent_id=part.request_id,
        choice=part.choice,
        round=part.round,
        attempt=part.attempt,
        batch_id=job.batch_id,
    )


def result_of(
    owner: Owner,
    status: Status,
    error_code: str,
    error_message: str,
    done_ns: int,
    error_param: str = "",
) -> JobResult:
    """Make the result of a job that no worker answered. A worker adds the answer."""
    return JobResult(
        request_id=owner.request_id,
        tenant=owner.tenant,
        model=owner.model,
        status=status.value,
        error_code=error_code,
        error_message=error_message,
        error_param=error_param,
        done_ns=done_ns,
    )


async def is_foreign_by_name(tenant: str, reply: str) -> bool:
    """Return whether a listener is another tenant's, by its name alone."""
    return not may_reply_to(tenant, reply)


class JobRefusals:
    """Refusals of dead-lettered jobs: a terminal frame, the result if asked for, a record.

    ``is_foreign_reply`` tells another tenant's listeners.
    """

    def __init__(
        self, frames: FrameStreams, results: Results, outbox: Outbox, clock: Clock
    ) -> None:
        self._frames = frames
        self._results = results
        self._outbox = outbox
        self._clock = clock
        self.is_foreign_reply: IsForeignReply = is_foreign_by_name

    async def refuse_unreadable(
        self,
        subject: str,
        payload: bytes,
        content_type: str | None,
        error: MalformedMessageError,
    ) -> None:
        """Refuse a message that is not a job, and tell its publisher as far as it is known."""
        owner = decoding.read_owner(subject, payload, content_type)
        is_reserved = subjects.is_reserved(subject)
        if not is_reserved and await self.is_foreign_reply(owner.tenant, owner.reply):
            owner = msgspec.structs.replace(owner, reply=owner.tenant)
        message = error.message
        if error.code == MalformedMessageError.code:
            message = f"The message is not a job: {message.removesuffix('.')}."
        if owner.has_valid_id and error.param != "request_id":
            message = f"{message} {_ID_IS_FREE}"
        await self._tell(owner, error.code, message, epoch=0, param=error.param)

    async def refuse(self, job: Job, code: str, message: str, num_deliveries: int) -> None:
        """Refuse a job that must not run: store its record, then tell its owner."""
        epoch = (num_deliveries - 1) * EPOCHS_PER_DELIVERY
        record = record_of(job, Status.FAILED, code, epoch, self._clock.now_ns())
        await self._outbox.publish(record)
        await self._tell(decoding.owner_of(job), code, message, epoch)

    async def _tell(
        self, owner: decoding.Owner, code: str, message: str, epoch: int, param: str = ""
    ) -> None:
        if owner.store_result and owner.request_id:
            now_ns = self._clock.now_ns()
            result = result_of(owner, Status.FAILED, code, message, now_ns, param)
            await self._results.store(result)
        if owner.reply:
            frame = Failed(code=code, message=message, epoch=epoch, param=param)
            await self._frames.publish(
                owner.reply, [(owner.request_id, frame)], as_json=owner.frames_as_json
            )


class QueuedMessage(NamedTuple):
    """Message in the queue, a job or not; ``sequence`` is its place."""

    subject: str
    payload: bytes
    content_type: str | None
    sequence: int
    num_deliveries: int = 0


class JobDeadLetters:
    """Dead letters of jobs.

    ``store`` keeps a dead letter once, by its job's place in the queue. The caller then removes the
    message from the queue.
    """

    def __init__(
        self,
        store: Callable[[DeadJob, int], Awaitable[None]],
        refusals: JobRefusals,
        clock: Clock,
        max_deliver: int,
    ) -> None:
        self._store = store
        self._refusals = refusals
        self._clock = clock
        self._max_deliver = max_deliver

    async def read(
        self, message: QueuedMessage, stored_ns: int, traceparent: str | None = None
    ) -> Job | None:
        """Return the job of a message that was stored at ``stored_ns``.

        A message that is no job, or was delivered too often, is refused and kept (None).
        """
        try:
            job = decoding.read_job(
                message.subject, message.payload, message.content_type, stored_ns, traceparent
            )
        except MalformedMessageError as error:
            await self.refuse_unreadable(message, error)
            return None
        if message.num_deliveries > self._max_deliver:
            await self._refuse_worn_out(message, job)
            return None
        return job

    async def refuse_unreadable(self, message: QueuedMessage, error: MalformedMessageError) -> None:
        """Keep a message that is not a job, and tell its publisher as far as it is known."""
        await self.keep_unreadable(message, error)
        await self._refusals.refuse_unreadable(
            message.subject, message.payload, message.content_type, error
        )

    async def keep_unreadable(self, message: QueuedMessage, error: MalformedMessageError) -> None:
        """Keep a message that is not a job, and tell no publisher."""
        owner = decoding.read_owner(message.subject, message.payload, message.content_type)
        await self._keep(message, decoding.MALFORMED, error.message, owner.request_id)

    async def _refuse_worn_out(self, message: QueuedMessage, job: Job) -> None:
        """Refuse a job that was delivered too often."""
        reason, num_deliveries = decoding.TOO_MANY_DELIVERIES, message.num_deliveries
        why = f"The job was delivered {num_deliveries - 1} times without an answer."
        await self._keep(message, reason, why, job.request_id)
        await self._refusals.refuse(job, reason, why, num_deliveries)

    async def _keep(self, message: QueuedMessage, reason: str, why: str, request_id: str) -> None:
        logger.warning(
            "moving a message to the dead letters",
            extra={"reason": reason, "subject": message.subject, "sequence": message.sequence},
        )
        dead = DeadJob(
            reason=reason,
            message=why,
            subject=message.subject,
            payload=message.payload,
            content_type=codec.stated_or_seen(without_mark(message.payload), message.content_type)
            or codec.MSGPACK,
            request_id=request_id,
            num_deliveries=message.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        await self._store(dead, message.sequence)


async def watch_stored_jobs(
    transport: Transport, on_published: Callable[[TenantQueue], None]
) -> Subscription:
    """Watch stored jobs.

    See ``JobQueue.watch``: the server repeats the subjects of stored messages.
    """

    def on_message(message: Message) -> None:
        try:
            tenant_queue = subjects.stored_tenant_queue_of(message.subject)
        except ValueError:
            return  # no tenant queue: ``JobQueue.tenant_queues`` handles it
        try:
            on_published(tenant_queue)
        except Exception:
            logger.exception("a watcher failed", extra={"subject": message.subject})

    return await transport.subscribe(subjects.ALL_STORED_JOBS, on_message)


async def watch_results(
    transport: Transport, tenant: str, on_stored: Callable[[str], None]
) -> Subscription:
    """Watch stored results. See ``Results.watch``: every subscriber hears the stream's messages."""

    def on_message(message: Message) -> None:
        on_stored(subjects.last_token(message.subject))

    return await transport.subscribe(subjects.results_of(tenant), on_message)
