"""Worker's bus side: one incarnation, from its first heartbeat to its last."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Iterator
from pathlib import Path

from millrace.bus.api import Bus
from millrace.bus.control import unless_forbidden
from millrace.bus.orphans import OrphanWatch
from millrace.bus.tenancy.settling import Settlements
from millrace.bus.transport import Subscription
from millrace.bus.worker_losses import cause_of_text, publish_loss
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock, until_beat_s
from millrace.runtime.process import num_oom_kills
from millrace.runtime.tasks import Tasks, first_error
from millrace.runtime.tracing import Tracing
from millrace.schemas.config import WorkerConfig
from millrace.schemas.control import (
    Cancel,
    CancelReason,
    Dispatch,
    Drain,
    Replay,
    ResetPrefixCache,
    SetRole,
    Warm,
    WorkerCommand,
    WorkerReply,
)
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import BusUnavailableError, MillraceError
from millrace.schemas.jobs import Job
from millrace.schemas.records import LossObserver, WorkerLossRecord
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.energy import EnergyCounter, EnergyMeter, NvmlCounter, RaplCounter
from millrace.workers.host.flusher import Flusher
from millrace.workers.host.generations.tracing import RunTraces
from millrace.workers.host.leases import Generations, IndexWriter, LeaseKeeper
from millrace.workers.host.reports.completion_events import CompletionEvents
from millrace.workers.host.reports.device_watch import DeviceWatch
from millrace.workers.host.reports.prefixes import PrefixReporter
from millrace.workers.host.reports.status import StatusReporter
from millrace.workers.host.requests import Requests
from millrace.workers.process.keeper import EngineKeeper

_CHECK_INTERVAL_S = 0.1
_GOODBYE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class Worker:
    """Server of ``ctl.worker.<worker_id>`` with a loaded engine.

    ``worker_id`` is unique to this incarnation. Everything that it starts ends with ``run``, except
    the engine.
    """

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        served_model: ServedModel,
        engine: EngineKeeper,
        clock: Clock,
        generations: Generations,
        tracing: Tracing | None = None,
        settlements: Settlements | None = None,
    ) -> None:
        self.worker_id = f"{config.name}-{uuid.uuid4().hex[:8]}"
        self.ready = asyncio.Event()
        self.energy = EnergyMeter(
            _counter_of(config, engine), lambda: engine.stats.busy_s, clock.monotonic
        )
        context = WorkerContext(
            self.worker_id, config, served_model, bus, engine, clock, self.energy
        )
        self._bus = bus
        self._config = config
        self._engine = engine
        self._clock = clock
        self._model = served_model.entry.name
        self._losses = Tasks()
        self._num_oom_kills = num_oom_kills()
        self._drain_requested = asyncio.Event()
        self._drained_s = math.inf
        self._shutdown_forced = False
        self._flusher = Flusher(bus.frames, clock, config.flush_interval_ms / 1e3)
        self._index = IndexWriter(generations, self.worker_id)
        self._completions = CompletionEvents(bus.control, self.worker_id)
        self.requests = Requests(
            context,
            self._flusher,
            self._index,
            generations,
            self._completions,
            lambda: self._status.note_capacity(),
            None if tracing is None else RunTraces(tracing, clock, self.worker_id),
            settlements,
        )
        self._leases = LeaseKeeper(
            bus.jobs, clock, config.lease_extend_s, self.requests.held_leases
        )
        self.orphans = OrphanWatch(bus, clock, self._open_jobs, self._on_orphan)
        self.device = DeviceWatch(lambda: engine.device_uuid)
        self._status = StatusReporter(context, self.requests, self.device)
        self._prefixes = PrefixReporter(bus, config, self.worker_id, served_model.entry.name, clock)

    @property
    def num_samples_lost(self) -> int:
        """Number of samples that the bus did not take."""
        return self._status.num_samples_lost

    def force_shutdown(self) -> None:
        """Release the running requests, now or as soon as the worker drains."""
        self._shutdown_forced = True

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set, then drain; the worker is retired at the end.

        After an unforeseen error the leases are released and the error is raised. Do not run this
        object again.

        Raises:
            EngineFailedError: the engine has ended and no other can be started. The leases lapse.
        """
        subscriptions: list[Subscription] = []
        requests = self.requests
        self._engine.listen(requests.on_outputs, self._prefixes.note, requests.on_device_times)
        self.requests.moves.on_pulled = self._status.announce_soon
        self._bus.on_reconnect(self._leases.extend_now)
        self._bus.on_reconnect(self._status.announce_soon)
        self._bus.on_reconnect(self._prefixes.report_whole)
        self._bus.on_reconnect(self.requests.ownership.note_disconnected)
        try:
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(service, name=name)
                    for name, service in (
                        (
                            "engine",
                            self._engine.run(self._on_engine_lost, self._on_engine_replaced),
                        ),
                        ("flusher", self._flusher.run()),
                        ("leases", self._leases.run()),
                        ("index", self._index.run()),
                        ("completion events", self._completions.run()),
                        ("moves", self.requests.moves.run()),
                        ("ownership", self.requests.ownership.run()),
                        ("watch", self._watch()),
                        ("orphans", self.orphans.run()),
                        ("drain", self._drain_when_requested()),
                    )
                ]
                await self._subscribe(subscriptions)
                services.append(group.create_task(self._status.run(), name="status"))
                services.append(group.create_task(self._prefixes.run(), name="prefixes"))
                services.append(group.create_task(self.energy.run(), name="energy"))
                self.ready.set()
                await stopping.wait()
                self._start_draining()
                await self._status.announce()
                await self._finish_drain()
                for service in services:
                    service.cancel()
        except* MillraceError as failed:
            error = first_error(failed)
            if isinstance(error, BusUnavailableError):
                await self._release(sends=False)
            raise error from None
        except* Exception:
            # Other workers take over its requests; they generate unsent tokens again.
            await self._release(sends=False)
            raise
        finally:
            await self._losses.close(_GOODBYE_TIMEOUT_S)
            await self._announce_retirement(subscriptions)

    async def _subscribe(self, subscriptions: list[Subscription]) -> None:
        control = self._bus.control
        subscriptions.append(await control.serve_commands(self.worker_id, self._on_command))
        subscriptions.append(await control.subscribe_cancels(self._on_cancel))
        cancels_of_services = control.subscribe_owner_cancels(self._on_cancel)
        subscriptions += await unless_forbidden(cancels_of_services, "hear cancels of services")
        on_pulled = self.requests.moves.note_pulled
        subscriptions.append(await control.subscribe_pulled(self.worker_id, on_pulled))
        subscriptions.append(await control.subscribe_queue_status(self._status.note_queue))

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        match command:
            case Dispatch():
                return self.requests.dispatch(command)
            case Cancel():
                return self.requests.cancel(command)
            case Replay():
                return self.requests.replay(command)
            case Drain():
                logger.info("draining", extra={"reason": command.reason})
                self._start_draining()
                return WorkerReply(ok=True)
            case Warm():
                return await self.requests.moves.warm(command)
            case SetRole():
                return await self._set_role(command)
            case ResetPrefixCache():
                return await self._reset_prefix_cache()

    async def _set_role(self, command: SetRole) -> WorkerReply:
        moves = self.requests.moves
        before, reply = moves.role, moves.set_role(command)
        if moves.role is not before:
            # Schedulers hear of the role before they hear of streams that leave because of it.
            await self._status.announce()
            moves.hand_on(self.requests.held())
        return reply

    async def _reset_prefix_cache(self) -> WorkerReply:
        try:
            await self._engine.reset_prefix_cache()
        except MillraceError as error:
            return WorkerReply(ok=False, reason=error.code, message=error.message)
        logger.info("the prefix cache was emptied")
        return WorkerReply(ok=True)

    def _on_cancel(self, cancel: Cancel) -> None:
        self.requests.cancel(cancel)

    def _open_jobs(self) -> Iterator[Job]:
        for generation in self.requests.held():
            if not generation.ended:
                yield generation.job

    def _on_orphan(self, request_id: str) -> None:
        self.requests.cancel(Cancel(request_id=request_id, reason=CancelReason.ORPHANED))

    def _on_engine_lost(self, why: str) -> None:
        self._record_loss(why)
        self.requests.on_engine_lost()
        self._status.announce_soon()

    def _record_loss(self, why: str) -> None:
        """Record that the engine has ended, before its requests are taken from it."""
        num_kills = num_oom_kills()
        cause, detail = cause_of_text(why, is_oom_kill=num_kills > self._num_oom_kills)
        self._num_oom_kills = num_kills
        loss = WorkerLossRecord(
            worker_id=self.worker_id,
            name=self._config.name,
            model=self._model,
            lost_ns=self._clock.now_ns(),
            cause=cause,
            observer=LossObserver.WORKER,
            detail=detail,
            num_requests=self.requests.num_running,
        )
        self._losses.spawn(publish_loss(self._bus, self._clock, loss), "record a lost engine")

    def _on_engine_replaced(self) -> None:
        self.requests.on_engine_replaced()
        self._status.announce_soon()

    async def _watch(self) -> None:
        while True:
            self.requests.ownership.check_for_gap()
            self.requests.expire_late()
            is_idle = not self.requests.num_running and not self.requests.num_ending
            interval_s = self._config.heartbeat_s if is_idle else _CHECK_INTERVAL_S
            await self._clock.sleep(until_beat_s(self._clock, interval_s))

    def _start_draining(self) -> None:
        if not self.requests.draining:
            self.requests.draining = True
            self._drained_s = self._clock.monotonic() + self._config.drain_timeout_s
            self._status.drain()
            self._drain_requested.set()

    async def _drain_when_requested(self) -> None:
        await self._drain_requested.wait()
        await self._finish_drain()

    async def _finish_drain(self) -> None:
        """Run requests that no other worker takes over until ``drain_timeout_s`` is up, then
        release the rest.

        The engine stays for streams that continue elsewhere and still pull their blocks.
        """
        requests = self.requests
        while requests.num_running or requests.num_ending or requests.moves.num_kept:
            if self._shutdown_forced or self._clock.monotonic() >= self._drained_s:
                break
            await self._clock.sleep(_CHECK_INTERVAL_S)
        await self._release(sends=True)

    async def _release(self, *, sends: bool) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await self.requests.release_unfinished(sends=sends)
        except (MillraceError, TimeoutError):
            logger.warning("leases could not be released; they lapse by themselves")

    async def _announce_retirement(self, subscriptions: list[Subscription]) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await self._status.announce(retired=True)
                await self._status.sample()
                for subscription in subscriptions:
                    await subscription.close()
        except TimeoutError:
            logger.warning("the bus was unreachable for the last heartbeat")


def _counter_of(config: WorkerConfig, engine: EngineKeeper) -> EnergyCounter | None:
    """Return the energy counter of the device that Millrace's own engine computes on, or None.

    The devices of other kinds of engines are unknown, and a simulated engine uses none. With
    several GPUs the counter would count only the first, so there is none.
    """
    if config.engine.kind is not EngineKind.REAL or not config.energy:
        return None
    if engine.device_uuid:
        return NvmlCounter(engine.device_uuid) if engine.num_devices == 1 else None
    powercap = Path(config.powercap_path)
    return RaplCounter(powercap) if powercap.is_dir() else None
