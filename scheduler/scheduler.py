"""One scheduler: what it hears, and who acts on it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from millrace.bus.api import Bus
from millrace.bus.control import unless_forbidden
from millrace.bus.fleet.directories import Directories
from millrace.bus.job_queue import TenantQueue
from millrace.bus.orphans import OrphanWatch
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.bus.transport import Subscription
from millrace.bus.worker_losses import publish_loss
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks, wait_unless_done
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.health_monitor import HealthMonitor
from millrace.scheduler.dispatch.lease_recovery import LeaseRecovery
from millrace.scheduler.dispatch.role_watch import RoleWatch
from millrace.scheduler.fleet.fleet import Departed, Departure
from millrace.scheduler.fleet.losses import loss_of
from millrace.scheduler.fleet.rollout_watch import RolloutWatch
from millrace.scheduler.intake.model_cache import ModelCache
from millrace.scheduler.intake.queue_watch import QueueWatch
from millrace.scheduler.intake.result_lookup import ResultLookup
from millrace.scheduler.intake.served_models import ModelCatalogue, ServedModels
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.finalizer import Finalizer
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import cancelled
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.control import (
    Cancel,
    CancelReason,
    Ended,
    MoveStreams,
    Prefilled,
    PrefixReport,
    WorkerStatus,
)
from millrace.schemas.errors import BusUnavailableError, MillraceError
from millrace.schemas.jobs import Job

logger = logging.getLogger(__name__)

_SUBSCRIBE_RETRY_S = 0.25
_STOP_TIMEOUT_S = 0.8
_GOODBYE_TIMEOUT_S = 0.4


class Scheduler:
    """Binds jobs to workers, late. Several may run side by side: the queue gives each job to one.

    Of the ``catalogue`` the models in ``config.models``, or all of them, are served. Jobs that no
    gateway admitted count against the ``limits`` of their tenants; without them, against none.
    ``directories`` are what jobs may name and what moves traffic among versions, which is driven
    here; without them there is none of that.
    Raises ModelNotFoundError if one of the models is not in the catalogue.

    ``run`` raises what ends one of its loops: a scheduler that pulls and watches no longer must
    not look alive.
    """

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        clock: Clock,
        catalogue: ModelCatalogue,
        running_requests: RunningRequests,
        traces: JobTraces | None = None,
        limits: LimitKeeper | None = None,
        directories: Directories | None = None,
    ) -> None:
        directories = directories or Directories.of(None, clock)
        is_foreign_reply = directories.reply_owners.is_foreign
        self.model_cache = model_cache = ModelCache(
            catalogue.load, trusts_templates=catalogue.trusts_templates
        )
        admission = None if limits is None else JobAdmission(limits, model_cache.prices, clock)
        self.context = SchedulerContext(
            bus,
            config,
            clock,
            running_requests,
            Finalizer(bus, clock, running_requests, model_cache.prices, traces, admission),
            traces,
            admission,
            is_foreign_reply,
        )
        self.context.lines.on_places = self._on_places
        bus.jobs.guard_replies(is_foreign_reply)
        self.models = ServedModels(self.context, model_cache, catalogue, directories)
        # The same while models come and go.
        self.dispatchers = self.models.dispatchers
        self.queue_estimates = self.models.queue_estimates
        self.pullers = self.models.pullers
        self.departures: Counter[Departure] = Counter()
        self.ready = asyncio.Event()
        self._answers = Tasks()
        self._services = Tasks()
        self._is_over = False
        self._queue_watch = QueueWatch(self.context, self.models, self._answers)
        self._health_monitor = HealthMonitor(
            self.context, self._on_departed, self._on_found_finished, self._finish_unwanted
        )
        self._lease_recovery = LeaseRecovery(
            self.context, self._on_silent, self._on_leases_released
        )
        self.rollouts = RolloutWatch(
            directories.rollouts,
            self.context.fleet,
            self.context.finalizer,
            self._num_waiting,
            clock,
        )
        self.roles = RoleWatch(self.context, self.dispatchers)
        self.orphans = OrphanWatch(bus, clock, self._waiting_jobs, self._on_orphan)
        self._results = ResultLookup(self.context, self.pullers)
        self._warmed: set[str] = set()

    async def follow(self, catalogue: ModelCatalogue, changed: Collection[str]) -> None:
        """Serve what the catalogue says now; ``changed`` as for ``ServedModels``."""
        self._warmed -= set(changed)
        await self.models.follow(catalogue, changed)
        self._queue_watch.wake()
        for model in changed:
            if model in self.dispatchers and self.context.fleet.num_workers(model):
                self._warm(model)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set, or raise what ends one of the loops; either way give
        back what was not dispatched. A scheduler runs once."""
        subscriptions: list[Subscription] = []
        self.context.bus.on_reconnect(self._on_reconnect)
        try:
            await self._subscribe(subscriptions)
            loops = [self._services.spawn(self.models.run(), "serve models")]
            loops.append(self._services.spawn(self._queue_watch.run(), "watch the queue"))
            loops.append(self._services.spawn(self._health_monitor.run(), "monitor health"))
            loops.append(self._services.spawn(self.context.lines.run(), "admit jobs"))
            recover = self._lease_recovery.run
            self._services.keep(recover, self.context.clock, "recover leases")
            self._services.keep(self.orphans.run, self.context.clock, "watch orphans")
            self.rollouts.start()
            self.roles.start()
            self.ready.set()
            await wait_unless_done(stopping, loops)
            await self._give_back()
        except Exception:
            await self._give_back()
            raise
        finally:
            self._is_over = True
            await self.models.close()
            await self.rollouts.close()
            await self.roles.close()
            await self._services.close()
            await self._answers.close(_GOODBYE_TIMEOUT_S)
            self.model_cache.close()
            for subscription in subscriptions:
                await subscription.close()

    async def _subscribe(self, subscriptions: list[Subscription]) -> None:
        bus = self.context.bus
        subscriptions.append(await bus.control.subscribe_cancels(self._on_cancel))
        subscriptions.append(await bus.control.subscribe_ended(self._on_ended))
        subscriptions.append(await bus.control.subscribe_moves(self._on_move))
        subscriptions.append(await bus.control.subscribe_prefilled(self._on_prefilled))
        subscriptions.append(await bus.jobs.watch(self._on_published))
        for subscribing, what in (
            (bus.jobs.recover_dropped(), "answer jobs that the NATS server drops as duplicates"),
            (bus.control.subscribe_owner_cancels(self._on_cancel), "hear cancels of services"),
            (bus.control.serve_results(self._results.find), "answer services with their results"),
        ):
            subscriptions += await unless_forbidden(subscribing, what)
        subscriptions.append(await bus.workers.watch_prefixes(self._on_prefixes))
        while True:
            try:
                subscriptions.append(await bus.workers.watch(self._on_status))
            except BusUnavailableError as error:
                logger.warning("the workers cannot be watched yet", extra={"reason": error.message})
                await self.context.clock.sleep(_SUBSCRIBE_RETRY_S)
            else:
                self._lease_recovery.started()
                return

    async def _give_back(self) -> None:
        for dispatcher in self.models.all_dispatchers():
            dispatcher.stop()
        await self.models.close()
        await self.context.tasks.close(_STOP_TIMEOUT_S)
        await self._release_undispatched()

    async def _release_undispatched(self) -> None:
        """Release what waits here; what a worker runs stays with the worker."""
        for scheduled in self.context.job_table:
            scheduled.stop_tracing()
        held = [scheduled for scheduled in self.context.job_table if scheduled.holds_lease]
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                for scheduled in held:
                    if scheduled.is_ended:
                        continue  # cancelled meanwhile
                    self.context.job_table.remove(scheduled)
                    await self.context.bus.jobs.release(scheduled.lease.token)
        except (BusUnavailableError, TimeoutError):
            logger.warning("jobs could not be given back; their leases lapse by themselves")

    # --- workers ---

    def _on_status(self, status: WorkerStatus) -> None:
        context = self.context
        self._lease_recovery.note(status)
        known = context.fleet.get(status.worker_id) is not None
        departed = context.fleet.observe(status, context.clock.monotonic(), context.clock.now_ns())
        if not known and context.fleet.get(status.worker_id) is not None:
            self._queue_watch.wake()
            logger.info(
                "a worker joined",
                extra={"worker_id": status.worker_id, "model": status.model},
            )
        if departed:
            self._on_departed(departed)
        dispatcher = self.dispatchers.get(status.model)
        if dispatcher is not None:
            self._warm(status.model)
            worker = context.fleet.get(status.worker_id)
            if worker is not None and (status.draining or status.engine_down):
                dispatcher.migrate_from(worker)
            dispatcher.dispatch_ready()

    def _on_move(self, move: MoveStreams) -> None:
        worker = self.context.fleet.get(move.worker_id)
        dispatcher = None if worker is None else self.dispatchers.get(worker.status.model)
        if worker is not None and dispatcher is not None:
            dispatcher.move_streams(worker, move.to_worker_id)

    def _on_prefilled(self, prefilled: Prefilled) -> None:
        worker = self.context.fleet.get(prefilled.worker_id)
        dispatcher = None if worker is None else self.dispatchers.get(worker.status.model)
        if worker is not None and dispatcher is not None:
            dispatcher.hand_on(worker, prefilled.request_ids)

    def _on_prefixes(self, report: PrefixReport) -> None:
        self.context.prefixes.apply(report)
        worker = self.context.fleet.get(report.worker_id)
        dispatcher = None if worker is None else self.dispatchers.get(worker.status.model)
        if worker is not None and dispatcher is not None:
            dispatcher.bring_ahead(worker)

    def _on_silent(self, worker_id: str) -> None:
        self._on_departed(self.context.fleet.give_up(worker_id))

    def _on_leases_released(self) -> None:
        for puller in self.pullers.values():
            puller.recount()

    def _on_published(self, tenant_queue: TenantQueue) -> None:
        self._queue_watch.wake()
        puller = self.pullers.get(tenant_queue.model)
        if puller is not None:
            puller.published(tenant_queue)

    def _on_places(self, models: Sequence[str]) -> None:
        for model in models:
            if (puller := self.pullers.get(model)) is not None:
                puller.wake()

    def _on_departed(self, departed: Sequence[Departed]) -> None:
        if departed:
            self._queue_watch.wake()
        for gone in departed:
            self.departures[gone.why] += 1
            logger.warning(
                "a worker is gone",
                extra={
                    "worker_id": gone.worker_id,
                    "why": gone.why.value,
                    "num_requests": len(gone.request_ids),
                },
            )
            recording = publish_loss(self.context.bus, self.context.clock, loss_of(gone))
            self._answers.spawn(recording, "record a lost worker")
            self.context.prefixes.drop(gone.worker_id)
            scheduled_jobs = [
                scheduled
                for request_id in gone.request_ids
                if (scheduled := self.context.job_table.get(request_id)) is not None
                and scheduled.worker_id == gone.worker_id
                and scheduled.phase is Phase.RUNNING
            ]
            if not scheduled_jobs:
                continue
            for scheduled in scheduled_jobs:
                scheduled.attempts.close(self.context.clock.now_ns())
            dispatcher = self.models.dispatcher_of(scheduled_jobs[0].job.model)
            if gone.why is Departure.RETIRED:
                for scheduled in scheduled_jobs:
                    dispatcher.runner.attempt_returned(scheduled)
            else:
                dispatcher.runner.worker_died(scheduled_jobs)
        self._dispatch_ready()

    def _warm(self, model: str) -> None:
        """Have the tokenizer ready before the first job needs it."""
        if model not in self._warmed:
            self._warmed.add(model)
            self._services.spawn(self._load(model), f"load {model}")

    async def _load(self, model: str) -> None:
        try:
            await self.model_cache.warm(model)
        except MillraceError as error:
            logger.warning(
                "a model cannot be loaded; its jobs will be refused",
                extra={"model": model, "code": error.code, "reason": error.message},
            )

    # --- requests ---

    def _on_ended(self, ended: Ended) -> None:
        worker = self.context.fleet.get(ended.worker_id)
        dispatcher = None if worker is None else self.dispatchers.get(worker.status.model)
        if dispatcher is not None:
            for served in ended.served:
                dispatcher.charge_served(served, ended.worker_id)
                self.rollouts.note(dispatcher.model, served.answer)
        for served in ended.served:
            if (scheduled := self.context.job_table.get(served.request_id)) is not None:
                scheduled.attempts.add_report(served, ended.worker_id, self.context.clock.now_ns())
        self._free_places(ended)
        released = frozenset(ended.released)
        num_answered = 0
        for request_id in ended.request_ids:
            scheduled = self.context.job_table.get(request_id)
            if scheduled is None:
                self.context.fleet.release(ended.worker_id, request_id)
                num_answered += request_id not in released
            elif request_id in released:
                if scheduled.phase is Phase.RUNNING and scheduled.worker_id == ended.worker_id:
                    self.models.dispatcher_of(scheduled.job.model).runner.attempt_returned(
                        scheduled
                    )
            elif scheduled.phase is Phase.RUNNING and scheduled.worker_id == ended.worker_id:
                self.models.dispatcher_of(scheduled.job.model).runner.complete(scheduled)
                num_answered += 1
            else:
                # A run that we thought lost may have answered it, or was superseded: ask.
                self._health_monitor.check_soon(scheduled)
        if dispatcher is not None:
            dispatcher.throughput.add(num_answered, self.context.clock.monotonic())
            dispatcher.dispatch_ready()

    def _free_places(self, ended: Ended) -> None:
        """The worker says whose requests have ended, but for those that never ran."""
        tenants = {served.request_id: served.tenant for served in ended.served}
        for request_id in ended.request_ids:
            scheduled = self.context.job_table.get(request_id)
            tenant = tenants.get(request_id) or ("" if scheduled is None else scheduled.job.tenant)
            if tenant:
                self.context.lines.freed(tenant)

    def _on_found_finished(self, scheduled: ScheduledJob) -> None:
        dispatcher = self.models.dispatcher_of(scheduled.job.model)
        dispatcher.runner.complete(scheduled)
        dispatcher.dispatch_ready()

    def _on_cancel(self, cancel: Cancel) -> None:
        scheduled = self.context.job_table.get(cancel.request_id)
        if cancel.below_epoch is not None:
            # Another scheduler runs it anew, unless it is what we said ourselves.
            if scheduled is not None and scheduled.attempts.highest_epoch < cancel.below_epoch:
                self.models.dispatcher_of(scheduled.job.model).runner.superseded(scheduled)
            return
        if cancel.reason is CancelReason.SUPERSEDED:
            return
        self.context.cancels.add(cancel, self.context.clock.monotonic())
        if scheduled is None:
            self.context.kept_cancels.note(cancel)
            return
        if scheduled.phase not in (Phase.HELD, Phase.WAITING):
            return
        reason = self.context.cancel_reason(scheduled)
        if reason is not None:
            dispatcher = self.models.dispatcher_of(scheduled.job.model)
            dispatcher.runner.finish(scheduled, cancelled(reason))
            dispatcher.dispatch_ready()

    def _waiting_jobs(self) -> Iterator[Job]:
        for scheduled in self.context.job_table:
            if scheduled.holds_lease:
                yield scheduled.job

    def _on_orphan(self, request_id: str) -> None:
        self._on_cancel(Cancel(request_id=request_id, reason=CancelReason.ORPHANED))

    def _finish_unwanted(self) -> None:
        self.context.lines.finish_unwanted(self.context.why_unwanted)
        for dispatcher in self.models.all_dispatchers():
            dispatcher.finish_unwanted()

    def _dispatch_ready(self) -> None:
        for dispatcher in self.dispatchers.values():
            dispatcher.dispatch_ready()

    def _num_waiting(self, model: str) -> int:
        queue_estimate = self.queue_estimates.get(model)
        return 0 if queue_estimate is None else queue_estimate.num_queued

    # --- the bus ---

    def _on_reconnect(self) -> None:
        if self._is_over:
            return  # this process runs a newer Scheduler
        self._health_monitor.reconnected()
        self.context.kept_cancels.reconnected()
        self._queue_watch.wake()
        self._dispatch_ready()
