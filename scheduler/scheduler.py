"""Scheduler: subscribes to the bus and passes events to the parts that act on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator

from millrace.bus.api import Bus
from millrace.bus.control import unless_forbidden
from millrace.bus.fleet.directories import Directories
from millrace.bus.job_queue import TenantQueue
from millrace.bus.orphans import OrphanWatch
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks, wait_unless_done
from millrace.scheduler.dispatch.lease_recovery import LeaseRecovery
from millrace.scheduler.dispatch.migration import JobMigration
from millrace.scheduler.dispatch.role_watch import RoleWatch
from millrace.scheduler.dispatch.rollout_watch import RolloutWatch
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.intake.queue_watch import QueueWatch
from millrace.scheduler.intake.result_lookup import ResultLookup
from millrace.scheduler.intake.served_models import ModelCatalogue, ServedModels
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.model_cache import ModelCache
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.stages import place, watch
from millrace.scheduler.stages.watch import HealthMonitor
from millrace.scheduler.state import SchedulerState
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
    """Scheduler that binds jobs to workers late. Several may run: the queue gives each job to one.

    It serves the models in ``config.models``, by default the whole ``catalogue``. Jobs that no
    gateway admitted count against their tenants' ``limits``; without ``limits`` they are not
    limited. ``directories`` has the adapters, and the rollouts, which this scheduler drives. It is
    optional. Raises ModelNotFoundError if a configured model is not in the catalogue.

    ``run`` raises the error that ends one of its loops: a scheduler that no longer pulls or watches
    must not look alive.
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
        model_cache = ModelCache(catalogue.load, trusts_templates=catalogue.trusts_templates)
        admission = None if limits is None else JobAdmission(limits, model_cache.prices, clock)
        self.state = SchedulerState(
            bus, config, clock, running_requests, model_cache, directories, traces, admission
        )
        bus.jobs.guard_replies(self.state.is_foreign_reply)
        self.models = ServedModels(self.state, catalogue)
        # These mappings stay the same objects while models come and go.
        self.model_queues = self.state.model_queues
        self.queue_estimates = self.models.queue_estimates
        self.pullers = self.models.pullers
        self.migration = JobMigration(self.state)
        self.ready = asyncio.Event()
        self._services = Tasks()
        self._is_over = False
        self._queue_watch = QueueWatch(self.state, self.models)
        self._health_monitor = HealthMonitor(self.state)
        self._lease_recovery = LeaseRecovery(self.state, self.pullers)
        self.rollouts = RolloutWatch(self.state, self.queue_estimates)
        self.roles = RoleWatch(self.state)
        self.orphans = OrphanWatch(bus, clock, self._waiting_jobs, self._on_orphan)
        self._results = ResultLookup(self.state, self.pullers)
        self._warmed: set[str] = set()

    async def follow(self, catalogue: ModelCatalogue, changed: Collection[str]) -> None:
        """Apply a changed catalogue. See ``ServedModels.follow``."""
        self._warmed -= set(changed)
        await self.models.follow(catalogue, changed)
        self.state.count_queue_soon()
        for model in changed:
            if model in self.model_queues and self.state.fleet.num_workers(model):
                self._warm(model)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set, or raise the error that ends one of the loops.

        Either way undispatched jobs are given back. A scheduler runs once.
        """
        subscriptions: list[Subscription] = []
        self.state.bus.on_reconnect(self._on_reconnect)
        try:
            await self._subscribe(subscriptions)
            loops = [self._services.spawn(self.models.run(), "serve models")]
            loops.append(self._services.spawn(self._queue_watch.run(), "watch the queue"))
            loops.append(self._services.spawn(self._health_monitor.run(), "monitor health"))
            loops.append(self._services.spawn(self.state.lines.run(), "admit jobs"))
            recover = self._lease_recovery.run
            self._services.keep(recover, self.state.clock, "recover leases")
            self._services.keep(self.orphans.run, self.state.clock, "watch orphans")
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
            await self.state.answers.close(_GOODBYE_TIMEOUT_S)
            self.state.model_cache.close()
            for subscription in subscriptions:
                await subscription.close()

    async def _subscribe(self, subscriptions: list[Subscription]) -> None:
        bus = self.state.bus
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
                logger.warning(
                    "workers cannot be watched yet; retrying", extra={"reason": error.message}
                )
                await self.state.clock.sleep(_SUBSCRIBE_RETRY_S)
            else:
                self._lease_recovery.started()
                return

    async def _give_back(self) -> None:
        self.state.lines.close()
        self.migration.stop()
        for model_queue in self.state.all_queues():
            model_queue.is_stopped = True
        await self.models.close()
        await self.state.tasks.close(_STOP_TIMEOUT_S)
        await self._release_undispatched()

    async def _release_undispatched(self) -> None:
        """Release the jobs that wait here. Jobs that workers run stay with the workers."""
        for scheduled in self.state.job_table:
            scheduled.stop_tracing()
        held = [scheduled for scheduled in self.state.job_table if scheduled.holds_lease]
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                for scheduled in held:
                    if scheduled.is_ended:
                        continue  # cancelled meanwhile
                    self.state.job_table.remove(scheduled)
                    await self.state.bus.jobs.release(scheduled.lease.token)
        except (BusUnavailableError, TimeoutError):
            logger.warning("jobs could not be released; their leases will lapse")

    # --- workers ---

    def _on_status(self, status: WorkerStatus) -> None:
        state = self.state
        self._lease_recovery.note(status)
        known = state.fleet.get(status.worker_id) is not None
        departed = state.fleet.observe(status, state.clock.monotonic(), state.clock.now_ns())
        if not known and state.fleet.get(status.worker_id) is not None:
            state.count_queue_soon()
            logger.info(
                "a worker joined",
                extra={"worker_id": status.worker_id, "model": status.model},
            )
        if departed:
            watch.departed(state, departed)
        model_queue = self.model_queues.get(status.model)
        if model_queue is not None:
            self._warm(status.model)
            worker = state.fleet.get(status.worker_id)
            if worker is not None and (status.draining or status.engine_down):
                self.migration.begin(worker)
            place.dispatch_ready(state, model_queue)

    def _served_worker(self, worker_id: str) -> WorkerView | None:
        """Return a live worker whose model is served here."""
        worker = self.state.fleet.get(worker_id)
        is_served = worker is not None and worker.status.model in self.model_queues
        return worker if is_served else None

    def _on_move(self, move: MoveStreams) -> None:
        if (worker := self._served_worker(move.worker_id)) is not None:
            self.migration.move(worker, move.to_worker_id)

    def _on_prefilled(self, prefilled: Prefilled) -> None:
        if (worker := self._served_worker(prefilled.worker_id)) is not None:
            self.migration.hand_on(worker, prefilled.request_ids)

    def _on_prefixes(self, report: PrefixReport) -> None:
        self.state.prefixes.apply(report)
        if (worker := self._served_worker(report.worker_id)) is not None:
            self.migration.bring_ahead(worker)

    def _on_published(self, tenant_queue: TenantQueue) -> None:
        self.state.count_queue_soon()
        puller = self.pullers.get(tenant_queue.model)
        if puller is not None:
            puller.published(tenant_queue)

    def _warm(self, model: str) -> None:
        """Load a model's tokenizer before its first job needs it."""
        if model not in self._warmed:
            self._warmed.add(model)
            self._services.spawn(self._load(model), f"load {model}")

    async def _load(self, model: str) -> None:
        try:
            await self.state.model_cache.get(model)
        except MillraceError as error:
            logger.warning(
                "a model cannot be loaded; its jobs will be refused",
                extra={"model": model, "code": error.code, "reason": error.message},
            )

    # --- requests ---

    def _on_ended(self, ended: Ended) -> None:
        if (worker := self._served_worker(ended.worker_id)) is not None:
            for served in ended.served:
                self.rollouts.note(worker.status.model, served.answer)
        watch.ended(self.state, ended)

    def _on_cancel(self, cancel: Cancel) -> None:
        watch.cancel(self.state, cancel)

    def _waiting_jobs(self) -> Iterator[Job]:
        for scheduled in self.state.job_table:
            if scheduled.holds_lease:
                yield scheduled.job

    def _on_orphan(self, request_id: str) -> None:
        self._on_cancel(Cancel(request_id=request_id, reason=CancelReason.ORPHANED))

    # --- the bus ---

    def _on_reconnect(self) -> None:
        if self._is_over:
            return  # this process runs a newer Scheduler
        self._health_monitor.reconnected()
        self.state.kept_cancels.reconnected()
        self.state.count_queue_soon()
        place.dispatch_all(self.state)
