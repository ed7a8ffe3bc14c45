"""Messages that repeat the request id of an earlier message: they are answered and never run.

The same job, published again for another reader, gets the answer of the first: the frames that its
worker has and makes from then on, or the stored result. Another job under the same id gets
``duplicate``. While the first job runs, a message with the same ``reply`` gets no frames of its
own, since its reader receives those of the first job.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.bus.stored_results import frames_of
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.stages import end
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Replay
from millrace.schemas.errors import BusForbiddenError, BusUnavailableError
from millrace.schemas.jobs import Job, JobResult

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_REPLAY_TIMEOUT_S = 1.0
# A worker keeps four readers of a request: the job's own, and the newest three.
_MAX_FOLLOWERS = 3
_MAX_FOLLOWING = 256


async def first_of(state: SchedulerState, scheduled: ScheduledJob) -> JobClaim | None:
    """Return the claim of an earlier message to a job's id; None if the id is this job's now.

    Gateways make up an id for each job, so their jobs are not looked up.
    """
    mine, lease = scheduled.claim, scheduled.lease
    if lease.tenant_queue.reserved:
        return None
    index, request_id = state.running_requests, scheduled.request_id
    is_new = not (lease.is_uncertain or scheduled.ran_before)
    first = await index.claim(request_id, mine, is_new=is_new)
    if first is None or first.sequence == 0 or await index.lookup(request_id) is not None:
        return first
    try:
        if await state.bus.jobs.is_open(first.sequence):
            return first
    except BusUnavailableError:
        return first  # asked again when this message is answered
    # It left the queue without a known run or end, so it was never answered.
    return await index.claim(request_id, mine, is_new=is_new, void_sequence=first.sequence)


def answer(state: SchedulerState, job: Job, lease: str, mine: JobClaim, first: JobClaim) -> None:
    """Answer a message without running it, and acknowledge it."""
    name = f"repeated {job.request_id}"
    state.tasks.spawn(_answer(state, job, lease, mine, first), name)


async def _answer(
    state: SchedulerState, job: Job, lease: str, mine: JobClaim, first: JobClaim
) -> None:
    request_id = job.request_id
    try:
        known = await _known(state, request_id)
        is_over = await _is_over(state, first, known)
        is_foreign = await state.is_foreign_reply(job.tenant, job.reply)
        if is_foreign:
            job = replace(job, reply=job.tenant)
        if job.reply == first.reply and not is_foreign and not is_over:
            await state.bus.jobs.ack(lease)
        elif mine.digest == first.digest and not is_foreign and _may_follow(state, job):
            state.followers[request_id] += 1
            try:
                await _follow(state, job, lease, first)
            finally:
                state.followers[request_id] -= 1
                if not state.followers[request_id]:
                    del state.followers[request_id]
        else:
            # The first job may still store a result, which this one must not prevent.
            is_shared = first.tenant in ("", job.tenant)
            awaits_result = is_shared and not is_over
            await end.answer_repeated(state, job, lease, awaits_result=awaits_result)
    except BusUnavailableError as error:
        logger.warning(
            "a repeated job could not be answered; it will be delivered again",
            extra={"reason": error.message},
        )


def _may_follow(state: SchedulerState, job: Job) -> bool:
    return (
        bool(job.reply)
        and state.followers[job.request_id] < _MAX_FOLLOWERS
        and state.followers.total() < _MAX_FOLLOWING
    )


async def _follow(state: SchedulerState, job: Job, lease: str, first: JobClaim) -> None:
    """Have the workers of the first job send its frames to this reader, too, until it ends.

    The message stays in the queue until then, so another scheduler takes over if this one dies.
    """
    request_id = job.request_id
    sent: RunningRequest | None = None
    while True:
        known = await _known(state, request_id)
        is_over = await _is_over(state, first, known)
        if known is not None and not _is_one_run(known, sent):
            is_sent = bool(known.worker_id) and await _ask(state, known.worker_id, job)
            sent = known if is_sent else None
        if is_over:
            break
        await state.bus.jobs.extend(lease)
        await state.clock.sleep(_LOOK_S)
    result = None if sent is not None else await _result_of(state, job)
    epoch = 0 if known is None else known.epoch
    if sent is None and result is None:
        await end.answer_repeated(state, job, lease, awaits_result=False, epoch=epoch)
        return
    if result is not None:
        await state.bus.frames.answer(job, *frames_of(result, epoch))
    await state.bus.jobs.ack(lease)


async def _result_of(state: SchedulerState, job: Job) -> JobResult | None:
    try:
        return await state.bus.results.fetch(job.tenant, job.request_id)
    except BusForbiddenError:
        return None  # permissions of an earlier version


async def _known(state: SchedulerState, request_id: str) -> RunningRequest | None:
    here = state.job_table.get(request_id)
    if here is not None and here.phase is JobPhase.RUNNING:
        epoch = here.attempts.epoch
        return RunningRequest(worker_id=here.worker_id, epoch=epoch, finished=False)
    return await state.running_requests.lookup(request_id)


async def _is_over(state: SchedulerState, first: JobClaim, known: RunningRequest | None) -> bool:
    if known is not None:
        return known.finished
    return first.sequence > 0 and not await state.bus.jobs.is_open(first.sequence)


async def _ask(state: SchedulerState, worker_id: str, job: Job) -> bool:
    """Ask a worker to send the frames to a job's reader; return whether it does."""
    replay = Replay(
        request_id=job.request_id,
        from_index=0,
        reply=job.reply,
        frames_as_json=job.frames_as_json,
        batch_frames=job.batch_frames,
    )
    answer = await state.bus.control.command(worker_id, replay, _REPLAY_TIMEOUT_S)
    return answer is not None and answer.ok


def _is_one_run(known: RunningRequest, sent: RunningRequest | None) -> bool:
    return sent is not None and (known.worker_id, known.epoch) == (sent.worker_id, sent.epoch)
