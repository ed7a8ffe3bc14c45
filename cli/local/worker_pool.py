"""Worker processes of a local system: started and stopped by command, or scaled to the number that
the schedulers want."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from millrace.bus.api import Bus
from millrace.bus.fleet.desired_replicas import DesiredReplicas
from millrace.bus.fleet.role_shares import NO_ROLES, RoleShares
from millrace.cli.local.scrape_targets import TargetedProcesses
from millrace.cli.local.supervisor import Process, StartError
from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.tasks import Tasks
from millrace.schemas.control import QueueStatus, WorkerStatus
from millrace.schemas.engines import WorkerRole

NewWorker = Callable[[str, str, WorkerRole], Process]


class WorkerPool:
    """Owner of the workers' states, and of the scaler if there is one; the supervisor owns the
    processes."""

    def __init__(
        self,
        processes: TargetedProcesses,
        new_worker: NewWorker,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """Create a pool.

        Args:
            new_worker: Makes a process of a name, a model and a role.
        """
        self.new_worker = new_worker
        self._processes = processes
        self._run_dir = run_dir
        self._say = say
        self._models: dict[str, str] = {}  # of the workers that were started here, by name
        self._roles: dict[str, WorkerRole] = {}
        self._shares: dict[str, RoleShares] = {}
        self._statuses: dict[str, WorkerStatus] = {}
        self._scaler: WorkerScaler | None = None

    def new_workers(self, model: str, count: int, shares: RoleShares = NO_ROLES) -> list[Process]:
        """Make ``count`` workers for the model under free names, without starting them; the first
        ones have the first roles."""
        self._shares[model] = shares
        made = []
        for index in range(count):
            present = [self._roles[name] for name, of in self._models.items() if of == model]
            role = shares.first[index] if index < len(shares.first) else shares.next(present)
            names = (f"worker-{number}" for number in itertools.count(1))
            name = next(name for name in names if not self._is_taken(name))
            self._models[name], self._roles[name] = model, role
            if self._scaler is not None:
                self._scaler.adopt(name, model, role)
            made.append(self.new_worker(name, model, role))
        return made

    def note(self, status: WorkerStatus) -> None:
        """Store a worker's status."""
        self._statuses[status.name] = status

    def status(self, name: str) -> WorkerStatus | None:
        """Return the latest status of the worker of that name."""
        return self._statuses.get(name)

    def shares(self, model: str) -> RoleShares:
        """Return the role shares of a model's workers."""
        return self._shares.get(model, NO_ROLES)

    async def is_there(self, name: str) -> bool:
        """Return whether the latest process under the name reports that it serves."""
        status = self._statuses.get(name)
        pid_file = self._run_dir / f"{name}.pid"
        return (
            status is not None
            and not status.retired
            and status.started_ns >= pid_file.stat().st_mtime_ns
        )

    async def start_scaling(self, bus: Bus, max_workers: int) -> None:
        """Follow the number of workers that the schedulers want from now on."""
        scaler = self._scaler = WorkerScaler(
            self._processes,
            self,
            max_workers,
            SystemClock(),
            self._say,
        )
        for name, model in self._models.items():
            scaler.adopt(name, model, self._roles[name])
        await bus.control.subscribe_queue_status(scaler.on_queue)

    async def start(self, model: str, count: int) -> None:
        """Start workers. Raises StartError if one does not come up, after stopping all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self.new_workers(model, count):
                    group.create_task(self._processes.start(process))
        except* (StartError, OSError) as failed:
            await self.stop(model)
            raise StartError(str(failed.exceptions[0])) from None

    async def stop(self, model: str) -> int:
        """Drain all workers of a model at once; return their number."""
        names = {name for name, of in self._models.items() if of == model}
        if self._scaler is not None:
            names |= await self._scaler.release_model(model)
        await asyncio.gather(*(self._processes.remove(name) for name in names))
        for name in names:
            self._models.pop(name, None)
            self._roles.pop(name, None)
            self._statuses.pop(name, None)
        return len(names)

    def num_held(self, model: str) -> int:
        """Return the number of requests at a model's workers, by their latest statuses."""
        return sum(
            status.num_running + status.num_waiting
            for status in self._statuses.values()
            if status.model == model and not status.retired
        )

    async def close(self) -> None:
        """Start and stop nothing more; the supervisor keeps the running workers."""
        if self._scaler is not None:
            await self._scaler.close()

    def _is_taken(self, name: str) -> bool:
        scaled = () if self._scaler is None else self._scaler.names()
        return name in self._models or name in scaled


# Seconds until a failed start is tried again: the first time, and at most.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class _State(Enum):
    STARTING = auto()
    UP = auto()
    STOPPING = auto()


@dataclass
class _Place:
    """Worker process, from before its start until it is gone. ``role`` is its initial role."""

    name: str
    model: str
    state: _State
    role: WorkerRole
    starting: asyncio.Task[None] | None = None


class WorkerScaler:
    """Scaler that starts and stops workers by queue statuses; it owns the tasks that do so, and the
    supervisor owns the processes.

    New workers start at once, side by side. Workers of a model are stopped one after the other, as
    each drains: its streams move to the others meanwhile. Workers that have not come up yet are
    stopped first, then those with the fewest requests, and of equals the youngest. Added and
    removed workers keep to their model's role shares. A name is free again when its process is
    gone. A failed start is reported and tried again later.
    """

    def __init__(
        self,
        processes: TargetedProcesses,
        workers: WorkerPool,
        max_workers: int,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._workers = workers
        self._max_workers = max_workers
        self._clock = clock
        self._say = say
        self._desired = DesiredReplicas()
        self._places: dict[str, _Place] = {}  # in the order of their starts
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and how long it is
        self._released: set[str] = set()  # models
        self._tasks = Tasks()
        self._closed = False

    def adopt(self, name: str, model: str, role: WorkerRole) -> None:
        """Take over a worker that is up or starting, with a role."""
        self._released.discard(model)
        self._places[name] = _Place(name, model, _State.UP, role)

    def names(self) -> Collection[str]:
        """Names of all workers that are up, starting or stopping."""
        return self._places.keys()

    async def release_model(self, model: str) -> set[str]:
        """Leave a model alone until a worker of it is adopted again; return the names of its
        workers, which the caller stops."""
        self._released.add(model)
        places = [place for place in self._places.values() if place.model == model]
        starting = [place.starting for place in places if place.starting is not None]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        for place in places:
            self._places.pop(place.name, None)
        return {place.name for place in places}

    def on_queue(self, status: QueueStatus) -> None:
        """Follow the number that the schedulers want. Returns at once."""
        if self._closed or status.model in self._released:
            return
        now_s = self._clock.monotonic()
        self._desired.note(status, now_s)
        desired = min(self._desired.of(status.model, now_s) or 0, self._max_workers)
        places = [place for place in self._places.values() if place.model == status.model]
        here = [place for place in places if place.state is not _State.STOPPING]
        if len(here) < desired:
            if now_s >= self._pauses.get(status.model, (now_s, 0.0))[0]:
                for _ in range(desired - len(here)):
                    self._start(status.model, desired)
        elif (
            len(here) > desired
            and len(here) == len(places)
            and self._desired.is_settled(status.model, now_s)
        ):
            self._stop(self._least_needed(self._in_spare_role(here)), desired)

    async def close(self) -> None:
        """Start and stop nothing more; the supervisor keeps the running workers."""
        self._closed = True
        await self._tasks.close()

    def _in_spare_role(self, places: list[_Place]) -> list[_Place]:
        roles = [self._role(place) for place in places]
        spare = self._workers.shares(places[0].model).spare(roles)
        return [place for place, role in zip(places, roles, strict=True) if role is spare]

    def _role(self, place: _Place) -> WorkerRole:
        status = self._workers.status(place.name) if place.state is _State.UP else None
        return place.role if status is None else status.role

    def _num_held(self, place: _Place) -> int:
        status = self._workers.status(place.name) if place.state is _State.UP else None
        return 0 if status is None else status.num_running + status.num_waiting

    def _least_needed(self, places: list[_Place]) -> _Place:
        def rank(indexed: tuple[int, _Place]) -> tuple[bool, int, int]:
            age, place = indexed
            return place.state is _State.UP, self._num_held(place), -age

        return min(enumerate(places), key=rank)[1]

    def _start(self, model: str, desired: int) -> None:
        names = (f"worker-{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._places)
        self._say(f"{name} is starting: {_are(desired)} wanted for {model}")
        present = [self._role(place) for place in self._places.values() if place.model == model]
        role = self._workers.shares(model).next(present)
        place = self._places[name] = _Place(name, model, _State.STARTING, role)
        place.starting = self._tasks.spawn(self._bring_up(place), f"start {name}")

    def _stop(self, place: _Place, desired: int) -> None:
        self._say(f"{place.name} is stopping: {_are(desired)} wanted for {place.model}")
        place.state = _State.STOPPING
        self._tasks.spawn(self._take_down(place), f"stop {place.name}")

    async def _bring_up(self, place: _Place) -> None:
        try:
            process = self._workers.new_worker(place.name, place.model, place.role)
            await self._processes.start(process)
        except (StartError, OSError) as error:
            self._say(str(error))
            self._pause(place.model)
            # From here on it does not count, and only this task stops it.
            place.state = _State.STOPPING
            await self._processes.remove(place.name)
            self._places.pop(place.name, None)
        else:
            place.state = _State.UP
            self._pauses.pop(place.model, None)

    async def _take_down(self, place: _Place) -> None:
        if place.starting is not None:
            place.starting.cancel()
            await asyncio.wait((place.starting,))
        await self._processes.remove(place.name)
        self._places.pop(place.name, None)

    def _pause(self, model: str) -> None:
        now_s = self._clock.monotonic()
        until_s, pause_s = self._pauses.get(model, (now_s, 0.0))
        if now_s < until_s:
            return  # it failed together with another
        pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._pauses[model] = (now_s + pause_s, pause_s)


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
