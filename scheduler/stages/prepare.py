"""Preparation stage: from a pulled job to a waiting one, by prompt, admission and earlier
attempts."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from millrace.runtime.redis.link import RedisUnreachableError
from millrace.scheduler.jobs.running_requests import last_worker
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, failed, refused
from millrace.scheduler.stages import end, place, repeated
from millrace.scheduler.state import SchedulerState
from millrace.schemas.errors import ForeignReplyError, MillraceError, ModelNotFoundError
from millrace.schemas.models.adapters import SEPARATOR, Adapter

logger = logging.getLogger(__name__)


_ADAPTERS_RETRY_S = 0.5


def start(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Take over a job and prepare it."""
    state.job_table.add(scheduled)
    state.lines.undecided(scheduled)
    state.queue_of(scheduled).queue.expect(scheduled)
    if state.traces is not None:
        scheduled.job, scheduled.trace = state.traces.start(
            scheduled.job, scheduled.lease.num_deliveries, scheduled.timing.stored_ns
        )
    state.tasks.spawn(_run(state, scheduled), f"prepare {scheduled.request_id}")


async def refuse(state: SchedulerState, scheduled: ScheduledJob, error: MillraceError) -> None:
    """End a job that gets no model.

    A job whose id belongs to another job is answered as a repeated one. Raises BusUnavailableError:
    it will be delivered again.
    """
    first = await repeated.first_of(state, scheduled)
    if first is not None:
        lease = scheduled.lease.token
        repeated.answer(state, scheduled.job, lease, scheduled.claim, first)
        return
    terminal_status = await _why_forbidden(state, scheduled) or refused(error)
    await end.answer(state, scheduled, terminal_status)


async def _run(state: SchedulerState, scheduled: ScheduledJob) -> None:
    try:
        await _prepare(state, scheduled)
    except MillraceError as error:
        end.finish(state, scheduled, refused(error))
    except Exception as error:
        logger.exception("a job could not be prepared", extra={"request_id": scheduled.request_id})
        message = f"The job could not be prepared: {type(error).__name__}."
        terminal_status = failed(MillraceError.code, message, retryable=False)
        end.finish(state, scheduled, terminal_status)
    finally:
        state.lines.decided(scheduled)


async def _prepare(state: SchedulerState, scheduled: ScheduledJob) -> None:
    first = await repeated.first_of(state, scheduled)
    if first is not None:
        if not scheduled.is_ended:
            end.complete(state, scheduled)
            lease = scheduled.lease.token
            repeated.answer(state, scheduled.job, lease, scheduled.claim, first)
        return
    await state.kept_cancels.recall(scheduled)
    terminal_status = await _why_forbidden(state, scheduled) or state.why_unwanted(scheduled)
    if terminal_status is None:
        scheduled.set_prepared(await state.model_cache.prepare(scheduled.job))
        await choose_adapter(state, scheduled)
        terminal_status = state.why_unwanted(scheduled)
    if scheduled.is_ended:
        return
    if terminal_status is None and scheduled.lease.is_uncertain and not scheduled.ran_before:
        known = await state.running_requests.lookup(scheduled.request_id)
        scheduled.ran_before = known is not None
    if terminal_status is not None:
        end.finish(state, scheduled, terminal_status)
    else:
        await _admit(state, scheduled)


async def _admit(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Queue a job once its tenant's limits admit it.

    A redelivered job may have been answered already, or may still run at a worker.
    """
    worker_id: str | None = ""
    if scheduled.ran_before:
        worker_id = await last_worker(state.running_requests, scheduled)
        if scheduled.is_ended:
            return
        scheduled.interrupted = bool(worker_id)
    if worker_id is None:
        end.acknowledge(state, scheduled)
        return
    terminal_status = await state.lines.admit(scheduled)
    if scheduled.phase is JobPhase.HELD:
        # A held job takes no place of the window, in which other tenants' jobs wait.
        state.queue_of(scheduled).queue.remove(scheduled)
        terminal_status = await state.lines.until_admitted(scheduled)
    if scheduled.is_ended:
        return
    if terminal_status is not None:
        end.finish(state, scheduled, terminal_status)
    elif worker_id and state.fleet.get(worker_id) is not None:
        place.continue_where_it_runs(state, scheduled, worker_id)
    else:
        place.enqueue(state, scheduled)


async def _why_forbidden(state: SchedulerState, scheduled: ScheduledJob) -> TerminalStatus | None:
    """Return the refusal of a job whose frames would go to another tenant; None if it is allowed.

    The refusal then goes to the job's own tenant.
    """
    job = scheduled.job
    if scheduled.lease.tenant_queue.reserved:
        return None
    if not await state.is_foreign_reply(job.tenant, job.reply):
        return None
    scheduled.job = replace(job, reply=job.tenant)
    return refused(ForeignReplyError(job.tenant))


# --- adapters ---


async def choose_adapter(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Resolve the adapter that a job names.

    A job without a version gets the adapter's present version, or the version that another
    scheduler chose. Waits while the directory is unreachable: an outage of a store does not end an
    accepted job.

    Raises ModelNotFoundError if the adapter is unknown, of another model, or not for its tenant.
    """
    job = scheduled.job
    if not job.adapter:
        return
    version = job.adapter_version
    adapter = await _find_adapter(state, scheduled, version)
    if adapter is not None and not version:
        version = await state.running_requests.settle_adapter(job.request_id, adapter.version)
        if version != adapter.version:
            adapter = await _find_adapter(state, scheduled, version)
    if scheduled.is_ended:
        return
    if adapter is None or adapter.model != job.model or not adapter.is_for(job.tenant):
        name = f"{job.model}{SEPARATOR}{job.adapter}"
        raise ModelNotFoundError(f"There is no model {name!r:.300} here.")
    scheduled.adapter = adapter.ref
    if adapter.version != job.adapter_version:
        scheduled.set_prepared(replace(job, adapter_version=adapter.version))


async def _find_adapter(
    state: SchedulerState, scheduled: ScheduledJob, version: str
) -> Adapter | None:
    while not scheduled.is_ended:
        try:
            return await state.directories.adapters.version(scheduled.job.adapter, version)
        except RedisUnreachableError:
            await state.clock.sleep(_ADAPTERS_RETRY_S)
    return None
