"""The worker processes of a local system, as they are started, scaled and stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from millrace.bus.api import Bus
from millrace.bus.fleet.role_shares import NO_ROLES, RoleShares
from millrace.cli.local.autoscale import WorkerScaler
from millrace.cli.local.scrape_targets import TargetedProcesses
from millrace.cli.local.supervisor import Process, StartError
from millrace.runtime.clock import SystemClock
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import WorkerRole

NewWorker = Callable[[str, str, WorkerRole], Process]


class WorkerPool:
    """Owns what is known of the workers, and the scaler if they are scaled; the processes are the
    supervisor's."""

    def __init__(
        self,
        processes: TargetedProcesses,
        new_worker: NewWorker,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """``new_worker`` makes a process of a name, a model and a role."""
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
        """As many workers for the model, under names that are free, not started so far; the first
        of them in the roles that come first."""
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
        """A worker tells how it stands."""
        self._statuses[status.name] = status

    def status(self, name: str) -> WorkerStatus | None:
        """What the worker of that name told last."""
        return self._statuses.get(name)

    def shares(self, model: str) -> RoleShares:
        """How the workers of a model share its roles out."""
        return self._shares.get(model, NO_ROLES)

    async def is_there(self, name: str) -> bool:
        """Whether the process that was started last under the name has told that it serves."""
        status = self._statuses.get(name)
        pid_file = self._run_dir / f"{name}.pid"
        return (
            status is not None
            and not status.retired
            and status.started_ns >= pid_file.stat().st_mtime_ns
        )

    async def start_scaling(self, bus: Bus, max_workers: int) -> None:
        """Have as many workers from now on as the schedulers want."""
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
        """Raises StartError if one of them does not come up; none of them is left then."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self.new_workers(model, count):
                    group.create_task(self._processes.start(process))
        except* (StartError, OSError) as failed:
            await self.stop(model)
            raise StartError(str(failed.exceptions[0])) from None

    async def stop(self, model: str) -> int:
        """Have all workers of a model drain, side by side; how many there were."""
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
        """How many requests the workers of a model have, as they told last."""
        return sum(
            status.num_running + status.num_waiting
            for status in self._statuses.values()
            if status.model == model and not status.retired
        )

    async def close(self) -> None:
        """Start and stop nothing more; what is there stays to the supervisor."""
        if self._scaler is not None:
            await self._scaler.close()

    def _is_taken(self, name: str) -> bool:
        scaled = () if self._scaler is None else self._scaler.names()
        return name in self._models or name in scaled
