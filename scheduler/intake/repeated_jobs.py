"""Messages that repeat the request id of another: they are answered and never run."""

from __future__ import annotations

import logging
from collections import Counter

from msgspec.structs import replace

from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.bus.stored_results import frames_of
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob
from millrace.schemas.control import Replay
from millrace.schemas.errors import BusForbiddenError, BusUnavailableError
from millrace.schemas.jobs import Job, JobResult

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_REPLAY_TIMEOUT_S = 1.0
# A worker keeps four readers of a request: the job's own, and the newest three.
_MAX_FOLLOWERS = 3
_MAX_FOLLOWING = 256


class RepeatedJobs:
    """Answers messages whose request id belongs to an earlier message.

    The same job, published again for another reader, gets the answer of the first: the frames that
    its worker has and makes from then on, or the stored result. Another job under the same id gets
    ``duplicate``. While the first job runs, a message with the same ``reply`` gets no frames of its
    own, since its reader receives those of the first job.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._followers: Counter[str] = Counter()

    async def first_of(self, scheduled: ScheduledJob) -> JobClaim | None:
        """The claim of another message to the id of a job that is about to be made ready; None if
        the id is this job's from now on. Gateways make up an id for each job, so their jobs are not
        looked up."""
        mine, lease = scheduled.claim, scheduled.lease
        if lease.tenant_queue.reserved:
            return None
        index, request_id = self._context.running_requests, scheduled.request_id
        is_new = not (lease.is_uncertain or scheduled.ran_before)
        first = await index.claim(request_id, mine, is_new=is_new)
        if first is None or first.sequence == 0 or await index.lookup(request_id) is not None:
            return first
        try:
            if await self._context.bus.jobs.is_open(first.sequence):
                return first
        except BusUnavailableError:
            return first  # whether it is over is asked again when this one is answered
        # It left the queue, and no process knows of a run or an end: it was not answered.
        return await index.claim(request_id, mine, is_new=is_new, void_sequence=first.sequence)

    def answer(self, job: Job, lease: str, mine: JobClaim, first: JobClaim) -> None:
        """Answer a message in place of running it, and take it out of the queue."""
        name = f"repeated {job.request_id}"
        self._context.tasks.spawn(self._answer(job, lease, mine, first), name)

    async def _answer(self, job: Job, lease: str, mine: JobClaim, first: JobClaim) -> None:
        context, request_id = self._context, job.request_id
        try:
            known = await self._known(request_id)
            is_over = await self._is_over(first, known)
            is_foreign = await context.is_foreign_reply(job.tenant, job.reply)
            if is_foreign:
                job = replace(job, reply=job.tenant)
            if job.reply == first.reply and not is_foreign and not is_over:
                await context.bus.jobs.ack(lease)
            elif mine.digest == first.digest and not is_foreign and self._may_follow(job):
                self._followers[request_id] += 1
                try:
                    await self._follow(job, lease, first)
                finally:
                    self._followers[request_id] -= 1
                    if not self._followers[request_id]:
                        del self._followers[request_id]
            else:
                # The first job may still store a result, which this one must not prevent.
                is_shared = first.tenant in ("", job.tenant)
                awaits_result = is_shared and not is_over
                await context.finalizer.finish_repeated(job, lease, awaits_result=awaits_result)
        except BusUnavailableError as error:
            logger.warning(
                "a repeated job could not be answered; it will be delivered again",
                extra={"reason": error.message},
            )

    def _may_follow(self, job: Job) -> bool:
        return (
            bool(job.reply)
            and self._followers[job.request_id] < _MAX_FOLLOWERS
            and self._followers.total() < _MAX_FOLLOWING
        )

    async def _follow(self, job: Job, lease: str, first: JobClaim) -> None:
        """Have each worker that runs the first job send its frames here too, to the end. The
        message stays in the queue until then, so another scheduler goes on if this one dies."""
        context, request_id = self._context, job.request_id
        sent: RunningRequest | None = None
        while True:
            known = await self._known(request_id)
            is_over = await self._is_over(first, known)
            if known is not None and not _is_one_run(known, sent):
                is_sent = bool(known.worker_id) and await self._ask(known.worker_id, job)
                sent = known if is_sent else None
            if is_over:
                break
            await context.bus.jobs.extend(lease)
            await context.clock.sleep(_LOOK_S)
        result = None if sent is not None else await self._result_of(job)
        epoch = 0 if known is None else known.epoch
        if sent is None and result is None:
            await context.finalizer.finish_repeated(job, lease, awaits_result=False, epoch=epoch)
            return
        if result is not None:
            frames = [(request_id, frame) for frame in frames_of(result, epoch)]
            await context.bus.frames.publish(
                job.reply, frames, batch=job.batch_frames, as_json=job.frames_as_json
            )
        await context.bus.jobs.ack(lease)

    async def _result_of(self, job: Job) -> JobResult | None:
        try:
            return await self._context.bus.results.fetch(job.tenant, job.request_id)
        except BusForbiddenError:
            return None  # permissions of an earlier version

    async def _known(self, request_id: str) -> RunningRequest | None:
        here = self._context.job_table.get(request_id)
        if here is not None and here.phase is Phase.RUNNING:
            epoch = here.attempts.epoch
            return RunningRequest(worker_id=here.worker_id, epoch=epoch, finished=False)
        return await self._context.running_requests.lookup(request_id)

    async def _is_over(self, first: JobClaim, known: RunningRequest | None) -> bool:
        if known is not None:
            return known.finished
        return first.sequence > 0 and not await self._context.bus.jobs.is_open(first.sequence)

    async def _ask(self, worker_id: str, job: Job) -> bool:
        """Whether the worker sends the frames."""
        replay = Replay(
            request_id=job.request_id,
            from_index=0,
            reply=job.reply,
            frames_as_json=job.frames_as_json,
            batch_frames=job.batch_frames,
        )
        answer = await self._context.bus.control.command(worker_id, replay, _REPLAY_TIMEOUT_S)
        return answer is not None and answer.ok


def _is_one_run(known: RunningRequest, sent: RunningRequest | None) -> bool:
    return sent is not None and (known.worker_id, known.epoch) == (sent.worker_id, sent.epoch)
