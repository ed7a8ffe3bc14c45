"""One scheduler: what it hears, and who acts on it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from bus.api import Bus, Line, Subscription
from bus.tenancy.keeper import LimitKeeper
from registry.routing.router import Router
from runtime.clock import Clock
from runtime.tasks import Tasks
from scheduler.dispatch.context import Generations, Parts
from scheduler.dispatch.dispatcher import Lane
from scheduler.dispatch.health_monitor import Watchman
from scheduler.dispatch.queue_estimate import Outlook
from scheduler.dispatch.takeover import Takeover
from scheduler.fleet.fleet import Departed, Departure, Fleet
from scheduler.intake.auto import AutoIntake, router_of
from scheduler.intake.model_cache import Preparer, Shelf
from scheduler.intake.orphan_reaper import Strays
from scheduler.intake.puller import Intake
from scheduler.intake.queue_watch import QueueWatch
from scheduler.intake.routing import AutoRouter
from scheduler.jobs.cancels import CancelMemory
from scheduler.jobs.entry import Entry, State
from scheduler.jobs.finalizer import Endings
from scheduler.jobs.limits import Door
from scheduler.jobs.terminal_status import cancelled
from scheduler.jobs.tracing import JobTraces
from scheduler.placement.prefix_index import PrefixIndex
from schemas.config import SchedulerConfig
from schemas.control import Cancel, CancelReason, Ended, WorkerStatus
from schemas.errors import BusUnavailableError, MillraceError, ModelNotFoundError

logger = logging.getLogger(__name__)

_SUBSCRIBE_RETRY_S = 0.25
_STOP_TIMEOUT_S = 0.8
_GOODBYE_TIMEOUT_S = 0.4


class Scheduler:
    """Binds jobs to workers, late. Several may run side by side: the queue gives each job to one.

    ``load_model`` may block. ``known_models`` is the whole catalogue; those in ``config.models``,
    or all of them, are served. Jobs that no gateway let in count against the ``limits`` of their
    tenants; without them, against none. Raises ModelNotFoundError if one of the models is not in
    the catalogue.

    ``run`` raises what ends one of its loops: a scheduler that pulls and watches no longer must
    not look alive.
    """

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        clock: Clock,
        known_models: Collection[str],
        load_model: Callable[[str], Preparer],
        generations: Generations,
        router: Router | None = None,
        traces: JobTraces | None = None,
        limits: LimitKeeper | None = None,
    ) -> None:
        unknown = set(config.models) - set(known_models)
        if unknown:
            raise ModelNotFoundError(
                f"scheduler.models names {', '.join(sorted(unknown))}, which the catalogue does "
                f"not have. The models are: {', '.join(sorted(known_models))}."
            )
        self.shelf = shelf = Shelf(load_model)
        door = None if limits is None else Door(limits, shelf.prices, clock)
        self.parts = Parts(
            bus=bus,
            config=config,
            clock=clock,
            generations=generations,
            fleet=Fleet(config.heartbeat_timeout_s),
            prefixes=PrefixIndex(config.max_prefix_keys),
            cancels=CancelMemory(config.cancel_memory_s),
            endings=Endings(bus, clock, generations, shelf.prices, traces, door),
            traces=traces,
            door=door,
        )
        models = config.models or tuple(sorted(known_models))
        self.lanes = {model: Lane(self.parts, model) for model in models}
        self.outlooks = {model: Outlook(self.parts, lane) for model, lane in self.lanes.items()}
        self.intakes = {
            model: Intake(self.parts, model, self.lanes, [model], shelf) for model in models
        }
        if router is not None:
            self._add_routes(router_of(router, self.outlooks, self.parts, generations))
        self.departures: Counter[Departure] = Counter()
        self.ready = asyncio.Event()
        self._answers = Tasks()
        self._services = Tasks()
        self._pulls = Tasks()
        self._queue_watch = QueueWatch(
            self.parts, self.intakes, self.lanes, self.outlooks, self._answers
        )
        names = () if router is None else router.routes
        self._strays = Strays(self.parts, (*known_models, *names))
        self._watchman = Watchman(
            self.parts, self._on_departed, self._on_found_ended, self._end_unwanted
        )
        self._takeover = Takeover(self.parts, self._on_silent, self._on_leases_released)
        self._warmed: set[str] = set()

    def _add_routes(self, router: AutoRouter) -> None:
        """Pull what leaves the model open, if any model that it may get is served here."""
        for name in router.names:
            if any(model in self.lanes for model in router.models_of(name)):
                self.intakes[name] = AutoIntake(self.parts, name, self.lanes, self.shelf, router)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set, then give back what was not dispatched."""
        subscriptions: list[Subscription] = []
        self.parts.bus.on_reconnect(self._on_reconnect)
        try:
            await self._subscribe(subscriptions)
            loops = [self._pulls.spawn(one.run(), "pull") for one in self.intakes.values()]
            loops += [
                self._services.spawn(one.run(), "tell positions") for one in self.outlooks.values()
            ]
            loops.append(self._services.spawn(self._queue_watch.run(), "watch the queue"))
            loops.append(self._services.spawn(self._strays.run(), "look for strays"))
            loops.append(self._services.spawn(self._watchman.run(), "watch"))
            self._services.spawn(self._takeover.run(), "take over")
            self.ready.set()
            await _until_set(stopping, loops)
            for lane in self.lanes.values():
                lane.stop()
            await self._pulls.close()
            await self.parts.tasks.close(_STOP_TIMEOUT_S)
            await self._give_back()
        finally:
            await self._pulls.close()
            await self._services.close()
            await self._answers.close(_GOODBYE_TIMEOUT_S)
            self.shelf.close()
            for subscription in subscriptions:
                await subscription.close()

    async def _subscribe(self, subscriptions: list[Subscription]) -> None:
        bus = self.parts.bus
        subscriptions.append(await bus.control.subscribe_cancels(self._on_cancel))
        subscriptions.append(await bus.control.subscribe_ended(self._on_ended))
        subscriptions.append(await bus.jobs.watch(self._on_published))
        subscriptions.append(await bus.workers.watch_prefixes(self.parts.prefixes.apply))
        while True:
            try:
                subscriptions.append(await bus.workers.watch(self._on_status))
            except BusUnavailableError as error:
                logger.warning("the workers cannot be watched yet", extra={"reason": error.message})
                await self.parts.clock.sleep(_SUBSCRIBE_RETRY_S)
            else:
                self._takeover.started()
                return

    async def _give_back(self) -> None:
        """Release what waits here; what a worker runs stays with the worker."""
        for entry in self.parts.table:
            entry.leave()
        held = [entry for entry in self.parts.table if entry.is_held]
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                for entry in held:
                    self.parts.table.drop(entry)
                    await self.parts.bus.jobs.release(entry.lease)
        except (BusUnavailableError, TimeoutError):
            logger.warning("jobs could not be given back; their leases lapse by themselves")

    # --- workers ---

    def _on_status(self, status: WorkerStatus) -> None:
        parts = self.parts
        self._takeover.note(status)
        known = parts.fleet.get(status.worker_id) is not None
        departed = parts.fleet.observe(status, parts.clock.monotonic(), parts.clock.now_ns())
        if not known and parts.fleet.get(status.worker_id) is not None:
            logger.info(
                "a worker is there",
                extra={"worker_id": status.worker_id, "model": status.model},
            )
        if departed:
            self._on_departed(departed)
        lane = self.lanes.get(status.model)
        if lane is not None:
            self._warm(status.model)
            worker = parts.fleet.get(status.worker_id)
            if worker is not None and (status.draining or status.engine_down):
                lane.move(worker)
            lane.pump()

    def _on_silent(self, worker_id: str) -> None:
        self._on_departed(self.parts.fleet.give_up(worker_id))

    def _on_leases_released(self) -> None:
        for intake in self.intakes.values():
            intake.leases_released()

    def _on_published(self, line: Line) -> None:
        intake = self.intakes.get(line.model)
        if intake is not None:
            intake.published(line)

    def _on_departed(self, departed: Sequence[Departed]) -> None:
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
            self.parts.prefixes.drop(gone.worker_id)
            entries = [
                entry
                for request_id in gone.request_ids
                if (entry := self.parts.table.get(request_id)) is not None
                and entry.worker_id == gone.worker_id
                and entry.state is State.RUNNING
            ]
            if not entries:
                continue
            for entry in entries:
                entry.lives.end(self.parts.clock.now_ns())
            lane = self.lanes[entries[0].job.model]
            if gone.why is Departure.RETIRED:
                for entry in entries:
                    lane.given_back(entry)
            else:
                lane.died(entries)
        self._pump()

    def _warm(self, model: str) -> None:
        """Have the tokenizer ready before the first job needs it."""
        if model not in self._warmed:
            self._warmed.add(model)
            self._services.spawn(self._load(model), f"load {model}")

    async def _load(self, model: str) -> None:
        try:
            await self.shelf.warm(model)
        except MillraceError as error:
            logger.warning(
                "a model cannot be loaded; its jobs will be refused",
                extra={"model": model, "code": error.code, "reason": error.message},
            )

    # --- requests ---

    def _on_ended(self, ended: Ended) -> None:
        worker = self.parts.fleet.get(ended.worker_id)
        if worker is not None and (lane := self.lanes.get(worker.status.model)) is not None:
            for served in ended.served:
                lane.served(served, ended.worker_id)
        for served in ended.served:
            if (entry := self.parts.table.get(served.request_id)) is not None:
                entry.lives.told(served, ended.worker_id, self.parts.clock.now_ns())
        released = frozenset(ended.released)
        num_answered = 0
        for request_id in ended.request_ids:
            entry = self.parts.table.get(request_id)
            if entry is None:
                self.parts.fleet.release(ended.worker_id, request_id)
                num_answered += request_id not in released
            elif request_id in released:
                if entry.state is State.RUNNING and entry.worker_id == ended.worker_id:
                    self.lanes[entry.job.model].given_back(entry)
            elif entry.state is State.RUNNING and entry.worker_id == ended.worker_id:
                self.lanes[entry.job.model].ended(entry)
                num_answered += 1
            else:
                # A run that we thought lost may have answered it, or was superseded: ask.
                self._watchman.doubt(entry)
        if worker is not None and (lane := self.lanes.get(worker.status.model)) is not None:
            lane.throughput.add(num_answered, self.parts.clock.monotonic())
            lane.pump()

    def _on_found_ended(self, entry: Entry) -> None:
        lane = self.lanes[entry.job.model]
        lane.ended(entry)
        lane.pump()

    def _on_cancel(self, cancel: Cancel) -> None:
        entry = self.parts.table.get(cancel.request_id)
        if cancel.below_epoch is not None:
            # Another scheduler runs it anew, unless it is what we said ourselves.
            if entry is not None and max(entry.epoch, entry.claimed_epoch) < cancel.below_epoch:
                self.lanes[entry.job.model].overtaken(entry)
            return
        if cancel.reason is CancelReason.SUPERSEDED:
            return
        self.parts.cancels.add(cancel.request_id, cancel.reason, self.parts.clock.monotonic())
        if entry is not None and entry.state is State.WAITING:
            lane = self.lanes[entry.job.model]
            lane.end(entry, cancelled(cancel.reason))
            lane.pump()

    def _end_unwanted(self) -> None:
        for lane in self.lanes.values():
            lane.end_unwanted()

    def _pump(self) -> None:
        for lane in self.lanes.values():
            lane.pump()

    # --- the bus ---

    def _on_reconnect(self) -> None:
        self._watchman.reconnected()
        self._pump()


async def _until_set(stopping: asyncio.Event, loops: Collection[asyncio.Task[None]]) -> None:
    """Return when ``stopping`` is set; raises what a loop fails with before that."""
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([waiting, *loops], return_when=asyncio.FIRST_COMPLETED)
        for loop in loops:
            if loop.done():
                loop.result()
    finally:
        waiting.cancel()
