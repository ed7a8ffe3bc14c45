"""Workers of a simulation: started, killed, drained and autoscaled."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock
from millrace.schemas.config import WorkerConfig
from millrace.schemas.control import Cancel, QueueStatus
from millrace.schemas.engines import WorkerRole
from millrace.simulation.outcomes import Outcomes
from millrace.simulation.settings import SimulationSettings
from millrace.simulation.workers.context import FleetContext, Spawn
from millrace.simulation.workers.heartbeats import Heartbeats, WorkerIdentity
from millrace.simulation.workers.kv_network import KvNetwork
from millrace.simulation.workers.leaps import LeapingBatch
from millrace.simulation.workers.moves import SimulatedMoves
from millrace.simulation.workers.worker import SimulatedWorker
from millrace.workers.simulated.latency_model import LatencyModel


@dataclass
class WorkerIncarnation:
    """Incarnation of a worker, with its times in seconds and its batch.

    It is paid for from ``paid_s`` on, works from ``up_s`` on, and is gone at ``gone_s``.
    """

    name: str
    model: str
    role: WorkerRole
    paid_s: float
    up_s: float | None = None
    gone_s: float | None = None
    batch: LeapingBatch | None = field(default=None, repr=False)

    def count_from(self, start_s: float, end_s: float) -> None:
        """Convert the loop's times to times from ``start_s``; a running worker lasts until
        ``end_s``."""
        self.paid_s -= start_s
        self.up_s = None if self.up_s is None else self.up_s - start_s
        self.gone_s = (end_s if self.gone_s is None else self.gone_s) - start_s


@dataclass
class _Place:
    """Place at which workers run one after the other."""

    name: str
    model: str
    role: WorkerRole
    phase: float
    rng: random.Random
    number: int = 0
    num_incarnations: int = 0
    worker: SimulatedWorker | None = None
    incarnation: WorkerIncarnation | None = None
    wanted: bool = True
    death: asyncio.TimerHandle | None = None


class SimulatedFleet:
    """Fleet of simulated workers, with the ``network`` between their caches.

    ``incarnations`` lists all incarnations. Each costs money.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: SimulationSettings,
        models: list[str],
        outcomes: Outcomes,
        spawn: Spawn,
        start_s: float,
    ) -> None:
        self.incarnations: list[WorkerIncarnation] = []
        self.num_deaths = 0
        self._bus = bus
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._config: WorkerConfig = settings.config.worker
        self._latency = LatencyModel(
            self._config.engine.simulation, self._config.engine.tensor_parallel
        )
        self.network = KvNetwork(
            settings.link,
            self._config.engine.block_size_tokens,
            self._latency.prefill_tokens_per_s,
        )
        self._context = FleetContext(bus, clock, self._config, outcomes, self.network, spawn)
        self._spawn = spawn
        self._start_s = start_s
        self._places: dict[str, list[_Place]] = {model: [] for model in models}
        self._all: list[_Place] = []

    async def start(self) -> None:
        """Start the first workers at once, then schedule failures."""
        await self._bus.control.subscribe_cancels(self._on_cancel)
        await self._bus.control.subscribe_queue_status(self._on_queue_status)
        for model in self._places:
            for _ in range(self._settings.workers_of(model)):
                await self._begin(self._new_place(model), delay_s=0.0)
        for failure in self._settings.failures:
            place = self._all[failure.worker - 1]
            self._loop.call_at(self._start_s + failure.at_s, self._kill, place)

    async def close(self) -> None:
        """Stop all workers."""
        for place in self._all:
            place.wanted = False
            if place.death is not None:
                place.death.cancel()
            if place.worker is not None:
                await place.worker.kill()

    def _new_place(self, model: str) -> _Place:
        number = len(self._all) + 1
        rng = random.Random(f"{self._settings.seed} worker {number}")
        places = self._places[model]
        role = self._settings.role_of(len(places), _roles(places))
        place = _Place(f"worker-{number}", model, role, rng.random(), rng, number)
        places.append(place)
        self._all.append(place)
        return place

    # --- incarnations ---

    async def _begin(self, place: _Place, delay_s: float) -> None:
        """Start an incarnation, which is paid for from now on and works ``delay_s`` later."""
        place.num_incarnations += 1
        incarnation = place.incarnation = WorkerIncarnation(
            place.name, place.model, place.role, paid_s=self._loop.time()
        )
        self.incarnations.append(incarnation)
        if delay_s > 0:
            await self._clock.sleep(delay_s)
            if place.incarnation is not incarnation:
                return  # it was removed before it was up
        worker = place.worker = self._new_worker(place)
        incarnation.up_s, incarnation.batch = self._loop.time(), worker.batch
        await worker.start()
        if self._settings.mtbf_s > 0:
            lasts_s = place.rng.expovariate(1 / self._settings.mtbf_s)
            place.death = self._loop.call_later(lasts_s, self._kill, place)

    def _new_worker(self, place: _Place) -> SimulatedWorker:
        engine = self._config.engine
        batch = LeapingBatch(
            self._latency,
            max_num_sequences=engine.max_num_sequences,
            max_batch_tokens=engine.max_batch_tokens,
            num_blocks=engine.num_blocks,
            block_size_tokens=engine.block_size_tokens,
            prefix_cache=engine.prefix_cache,
            inter_token=self._context.outcomes.inter_token,
        )
        worker_id = f"{place.name}-{place.num_incarnations}"
        moves = SimulatedMoves(
            self._context, worker_id, place.role, moves_blocks=self._settings.moves_blocks
        )
        heartbeats = Heartbeats(
            self._context,
            WorkerIdentity(worker_id, place.name, place.model),
            moves,
            place.phase,
            self._latency.prefill_tokens_per_s,
        )
        return SimulatedWorker(
            self._context,
            batch,
            heartbeats,
            moves,
            lambda worker: self._on_idle(place, worker),
        )

    def _kill(self, place: _Place) -> None:
        if place.worker is not None and place.worker.alive:
            self.num_deaths += 1
            self._spawn(self._die(place, place.worker))

    async def _die(self, place: _Place, worker: SimulatedWorker) -> None:
        self._end_life(place)
        await worker.kill()
        await self._clock.sleep(self._settings.restart_s)
        if place.wanted and place.incarnation is None:
            await self._begin(place, self._latency.start_s)

    def _end_life(self, place: _Place) -> None:
        place.worker = None
        if place.death is not None:
            place.death.cancel()
        if place.incarnation is not None:
            place.incarnation.gone_s = self._loop.time()
            place.incarnation = None

    def _on_idle(self, place: _Place, worker: SimulatedWorker) -> None:
        if place.worker is worker:
            self._end_life(place)
            self._spawn(worker.retire())

    # --- messages ---

    def _on_cancel(self, cancel: Cancel) -> None:
        for place in self._all:
            if place.worker is not None:
                place.worker.on_cancel(cancel)

    def _on_queue_status(self, status: QueueStatus) -> None:
        if self._settings.config.scheduler.autoscale.is_on and status.model in self._places:
            self._scale(status.model, status.desired_workers)

    def _scale(self, model: str, desired: int) -> None:
        places = self._places[model]
        here = [place for place in places if place.wanted]
        for _ in range(desired - len(here)):
            free = next((p for p in places if not p.wanted and p.incarnation is None), None)
            if free is not None:
                free.role = self._settings.role_of(len(places), _roles(places))
            place = free or self._new_place(model)
            place.wanted = True
            self._spawn(self._begin(place, self._latency.start_s))
        # Workers with the least load go first: they are gone soonest, and move least.
        here.sort(key=lambda place: (place.worker is not None, _num_runs(place), -place.number))
        while len(here) > desired:
            spare = self._settings.role_shares.spare([_role(place) for place in here])
            place = next(place for place in here if _role(place) is spare)
            here.remove(place)
            place.wanted = False
            if place.worker is not None:
                self._spawn(self._drain(place, place.worker))
            elif place.incarnation is not None:
                place.incarnation.gone_s, place.incarnation = self._loop.time(), None

    async def _drain(self, place: _Place, worker: SimulatedWorker) -> None:
        await worker.drain()
        await self._clock.sleep(self._config.drain_timeout_s)
        self._on_idle(place, worker)


def _num_runs(place: _Place) -> int:
    return 0 if place.worker is None else len(place.worker.runs)


def _role(place: _Place) -> WorkerRole:
    """Return a place's present role."""
    return place.role if place.worker is None else place.worker.role


def _roles(places: list[_Place]) -> list[WorkerRole]:
    """Return the roles of the wanted places."""
    return [_role(place) for place in places if place.wanted]
