"""The worker processes of a local system, as they are started, scaled and stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.bus.api import Bus
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
        self._processes = processes
        self._new_worker = new_worker
        self._run_dir = run_dir
        self._say = say
        self._models: dict[str, str] = {}  # of the workers that were started here, by name
        self._statuses: dict[str, WorkerStatus] = {}
        self._scaler: WorkerScaler | None = None

    def new_workers(
        self, model: str, count: int, roles: Sequence[WorkerRole] = ()
    ) -> list[Process]:
        """As many workers for the model, under names that are free, not started so far; the first
        of them in the given roles."""
        made = []
        for index in range(count):
            role = roles[index] if index < len(roles) else WorkerRole.BOTH
            names = (f"worker-{number}" for number in itertools.count(1))
            name = next(name for name in names if not self._is_taken(name))
            self._models[name] = model
            if self._scaler is not None:
                self._scaler.adopt(name, model)
            made.append(self._new_worker(name, model, role))
        return made

    def note(self, status: WorkerStatus) -> None:
        """A worker tells how it stands."""
        self._statuses[status.name] = status

    def status(self, name: str) -> WorkerStatus | None:
        """What the worker of that name told last."""
        return self._statuses.get(name)

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
            lambda name, model: self._new_worker(name, model, WorkerRole.BOTH),
            self._num_held,
            max_workers,
            SystemClock(),
            self._say,
        )
        for name, model in self._models.items():
            scaler.adopt(name, model)
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
            self._statuses.pop(name, None)
        return len(names)

    def num_held(self, model: str) -> int:
        """How many requests the workers of a model have, as they told last."""
        return sum(
            self._num_held(name)
            for name, status in self._statuses.items()
            if status.model == model and not status.retired
        )

    async def close(self) -> None:
        """Start and stop nothing more; what is there stays to the supervisor."""
        if self._scaler is not None:
            await self._scaler.close()

    def _is_taken(self, name: str) -> bool:
        scaled = () if self._scaler is None else self._scaler.names()
        return name in self._models or name in scaled

    def _num_held(self, name: str) -> int:
        status = self._statuses.get(name)
        return 0 if status is None else status.num_running + status.num_waiting
