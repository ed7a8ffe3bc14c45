"""Answers for jobs that the queue itself gives up on, so that nobody waits for ever."""

from __future__ import annotations

import msgspec

from millrace.bus import subjects
from millrace.bus.api import Outbox, Results
from millrace.bus.frames import FrameStreams
from millrace.bus.job_queue import IsForeignReply
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import record_of, result_of
from millrace.runtime.clock import Clock
from millrace.schemas.control import EPOCHS_PER_DELIVERY
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import Job
from millrace.schemas.records import Status
from millrace.schemas.tenants import may_reply_to

_ID_IS_FREE = "Its request_id is free: a corrected job may have it."


async def is_foreign_by_name(tenant: str, reply: str) -> bool:
    """Whether a listener is another tenant's, as far as its name says."""
    return not may_reply_to(tenant, reply)


class Refusals:
    """Tells the owner of a dead-lettered job: a terminal frame, the result if asked for, a record.

    ``is_foreign_reply`` says which listeners are another tenant's."""

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
        """For a message that is not a job: its publisher is told, as far as it can be read."""
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
        """For a job that must not run: its record is stored, then its owner is told."""
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
