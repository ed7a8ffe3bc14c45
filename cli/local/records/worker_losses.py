"""Workers of a local system whose processes were lost, as records."""

from __future__ import annotations

from collections.abc import Callable

from millrace.bus.api import Bus
from millrace.bus.worker_losses import cause_of_code, publish_loss
from millrace.cli.local.supervisor import Lost
from millrace.runtime.clock import SystemClock
from millrace.runtime.tasks import Tasks
from millrace.schemas.control import WorkerStatus
from millrace.schemas.records import LossObserver, WorkerLossRecord

_CLOSE_TIMEOUT_S = 1.0


class WorkerLosses:
    """Records how workers' processes ended. ``status_of`` is what the worker of a name told last;
    other processes, and workers that have not told anything yet, have no record."""

    def __init__(self, status_of: Callable[[str], WorkerStatus | None]) -> None:
        self._status_of = status_of
        self._clock = SystemClock()
        self._tasks = Tasks()

    def note(self, bus: Bus, lost: Lost) -> None:
        """A process has ended. Returns at once."""
        status = self._status_of(lost.name)
        if status is None:
            return
        cause, detail = cause_of_code(lost.code, lost.oom_kills)
        loss = WorkerLossRecord(
            worker_id=status.worker_id,
            name=status.name,
            model=status.model,
            lost_ns=self._clock.now_ns(),
            cause=cause,
            observer=LossObserver.PROCESS_KEEPER,
            detail=detail,
            num_requests=status.num_running + status.num_waiting,
        )
        self._tasks.spawn(publish_loss(bus, self._clock, loss), "record a lost worker")

    async def close(self) -> None:
        """Wait a moment for records that are on their way."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
