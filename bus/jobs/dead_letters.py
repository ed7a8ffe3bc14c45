"""Messages of the work queue that are given up on: kept with why, and their owners told."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millrace.bus import codec
from millrace.bus.jobs import decoding
from millrace.bus.jobs.refusals import Refusals
from millrace.runtime.clock import Clock
from millrace.runtime.json.tolerant import without_mark
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.jobs import DeadJob, Job

logger = logging.getLogger(__name__)


class QueuedMessage(NamedTuple):
    """A message as the queue has it, job or not; ``sequence`` is its place there."""

    subject: str
    payload: bytes
    content_type: str | None
    sequence: int
    num_deliveries: int = 0


class JobDeadLetters:
    """``store`` keeps a dead letter, given with its job's place in the queue: once. To take the
    message out of the queue is left to the caller, after that."""

    def __init__(
        self, store: Callable[[DeadJob, int], Awaitable[None]], refusals: Refusals, clock: Clock
    ) -> None:
        self._store = store
        self._refusals = refusals
        self._clock = clock

    async def refuse_unreadable(self, message: QueuedMessage, error: MalformedMessageError) -> None:
        """For a message that is not a job, whose publisher is told as far as it can be made out."""
        await self.keep_unreadable(message, error)
        await self._refusals.refuse_unreadable(
            message.subject, message.payload, message.content_type, error
        )

    async def keep_unreadable(self, message: QueuedMessage, error: MalformedMessageError) -> None:
        """The same, but nobody is told."""
        owner = decoding.read_owner(message.subject, message.payload, message.content_type)
        await self._keep(message, decoding.MALFORMED, error.message, owner.request_id)

    async def refuse_worn_out(self, message: QueuedMessage, job: Job) -> None:
        """For a job that was delivered too often."""
        reason, num_deliveries = decoding.TOO_MANY_DELIVERIES, message.num_deliveries
        why = f"The job was delivered {num_deliveries - 1} times without an answer."
        await self._keep(message, reason, why, job.request_id)
        await self._refusals.refuse(job, reason, why, num_deliveries)

    async def _keep(self, message: QueuedMessage, reason: str, why: str, request_id: str) -> None:
        logger.warning(
            "a job goes to the dead letters",
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
