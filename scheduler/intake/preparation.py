"""From a pulled job to one that waits for a worker: prompt, admission, what became of it before."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.dispatcher import Dispatcher
from millrace.scheduler.intake.adapter_choice import AdapterChooser
from millrace.scheduler.intake.model_cache import ModelCache
from millrace.scheduler.intake.repeated_jobs import RepeatedJobs
from millrace.scheduler.jobs.running_requests import last_worker
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, failed, refused
from millrace.schemas.errors import ForeignReplyError, MillraceError
from millrace.schemas.jobs import Job

logger = logging.getLogger(__name__)


class Preparation:
    """Makes pulled jobs ready and hands each to the dispatcher of its model, or ends it."""

    def __init__(
        self, context: SchedulerContext, model_cache: ModelCache, adapters: AdapterDirectory
    ) -> None:
        self._context = context
        self.repeated = RepeatedJobs(context)
        self._model_cache = model_cache
        self._adapters = AdapterChooser(adapters, context.running_requests, context.clock)

    def start(self, scheduled: ScheduledJob, dispatcher: Dispatcher) -> None:
        """Answer for a job from now on."""
        context = self._context
        context.job_table.add(scheduled)
        context.lines.undecided(scheduled)
        dispatcher.queue.expect(scheduled)
        if context.traces is not None:
            scheduled.job, scheduled.trace = context.traces.start(
                scheduled.job, scheduled.lease.num_deliveries, scheduled.timing.stored_ns
            )
        context.tasks.spawn(self._run(scheduled, dispatcher), f"prepare {scheduled.request_id}")

    async def read(self, job: Job) -> GenerationRequest:
        """What the body of a job asks for. Raises MillraceError for a bad one."""
        return await self._model_cache.read(job)

    async def refuse(self, scheduled: ScheduledJob, error: MillraceError) -> None:
        """End a job that no model can have. A job whose id belongs to another job is answered as
        a repeated one. Raises BusUnavailableError: it will be delivered again."""
        first = await self.repeated.first_of(scheduled)
        if first is not None:
            self.repeated.answer(scheduled.job, scheduled.lease.token, scheduled.claim, first)
            return
        terminal_status = await self._why_forbidden(scheduled) or refused(error)
        await self._context.finalizer.finish(scheduled, terminal_status)

    async def _run(self, scheduled: ScheduledJob, dispatcher: Dispatcher) -> None:
        try:
            await self._prepare(scheduled, dispatcher)
        except MillraceError as error:
            dispatcher.runner.finish(scheduled, refused(error))
        except Exception as error:
            logger.exception(
                "a job could not be prepared", extra={"request_id": scheduled.request_id}
            )
            message = f"The job could not be prepared: {type(error).__name__}."
            terminal_status = failed(MillraceError.code, message, retryable=False)
            dispatcher.runner.finish(scheduled, terminal_status)
        finally:
            self._context.lines.decided(scheduled)

    async def _prepare(self, scheduled: ScheduledJob, dispatcher: Dispatcher) -> None:
        context = self._context
        first = await self.repeated.first_of(scheduled)
        if first is not None:
            if not scheduled.is_ended:
                dispatcher.runner.complete(scheduled)
                lease = scheduled.lease.token
                self.repeated.answer(scheduled.job, lease, scheduled.claim, first)
            return
        await context.kept_cancels.recall(scheduled)
        terminal_status = await self._why_forbidden(scheduled) or context.why_unwanted(scheduled)
        if terminal_status is None:
            scheduled.set_prepared(await self._model_cache.prepare(scheduled.job))
            await self._adapters.choose(scheduled)
            terminal_status = context.why_unwanted(scheduled)
        if scheduled.is_ended:
            return
        if terminal_status is None and scheduled.lease.is_uncertain and not scheduled.ran_before:
            known = await context.running_requests.lookup(scheduled.request_id)
            scheduled.ran_before = known is not None
        if terminal_status is not None:
            dispatcher.runner.finish(scheduled, terminal_status)
        else:
            await self._admit(scheduled, dispatcher)

    async def _admit(self, scheduled: ScheduledJob, dispatcher: Dispatcher) -> None:
        """A job that was delivered before may be answered, or run somewhere still."""
        context = self._context
        worker_id: str | None = ""
        if scheduled.ran_before:
            worker_id = await last_worker(context.running_requests, scheduled)
            if scheduled.is_ended:
                return
            scheduled.interrupted = bool(worker_id)
        if worker_id is None:
            dispatcher.runner.acknowledge(scheduled)
            return

        def decided(terminal_status: TerminalStatus | None) -> None:
            if terminal_status is not None:
                dispatcher.runner.finish(scheduled, terminal_status)
            elif worker_id and context.fleet.get(worker_id) is not None:
                dispatcher.continue_where_it_runs(scheduled, worker_id)
            elif not scheduled.is_ended:
                dispatcher.enqueue(scheduled)

        await context.lines.admit(scheduled, decided)
        if scheduled.phase is Phase.HELD:
            # It takes no place of the window, in which other tenants' jobs wait.
            dispatcher.queue.remove(scheduled)

    async def _why_forbidden(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why its frames must not go where it says; the tenant's own listener is told so then."""
        job = scheduled.job
        if scheduled.lease.tenant_queue.reserved:
            return None
        if not await self._context.is_foreign_reply(job.tenant, job.reply):
            return None
        scheduled.job = replace(job, reply=job.tenant)
        return refused(ForeignReplyError(job.tenant))
