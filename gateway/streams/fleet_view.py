"""Gateway's view of the fleet: live workers and full queues."""

from __future__ import annotations

from millrace.bus.api import Bus
from millrace.bus.fleet.desired_replicas import DesiredReplicas
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.schemas.control import QueueStatus, WorkerStatus
from millrace.schemas.errors import QueueFullError

_WORKER_SILENCE_S = 3.0
# Three heartbeats of a worker with the default interval.
_OVERDUE_S = 1.5
_QUEUE_SILENCE_S = 5.0
_MIN_RETRY_AFTER_S = 1.0


class FleetView:
    """View of the fleet from heartbeats and queue status; reports older than a few seconds count as
    gone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, tuple[WorkerStatus, float]] = {}
        self._queues: dict[str, tuple[QueueStatus, float]] = {}
        self._wanted = DesiredReplicas()
        self._subscriptions: list[Subscription] = []

    async def start(self, bus: Bus) -> None:
        self._subscriptions = [
            await bus.workers.watch(self.on_worker),
            await bus.control.subscribe_queue_status(self.on_queue),
        ]

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        self._subscriptions = []

    def on_worker(self, status: WorkerStatus) -> None:
        """Take in a worker's heartbeat. A worker keeps its name over restarts: a new incarnation
        replaces the former one, until that is heard again.
        """
        worker_id = status.worker_id
        if status.retired:
            self._workers.pop(worker_id, None)
            return
        if worker_id not in self._workers:
            for former, _ in list(self._workers.values()):
                if former.name == status.name and former.started_ns < status.started_ns:
                    del self._workers[former.worker_id]
        self._workers[worker_id] = (status, self._clock.monotonic())

    def on_queue(self, status: QueueStatus) -> None:
        now_s = self._clock.monotonic()
        self._queues[status.model] = (status, now_s)
        self._wanted.note(status, now_s)

    def live_workers(self, model: str | None = None) -> list[WorkerStatus]:
        """Return the workers with recent heartbeats, of one model or of all."""
        oldest_s = self._clock.monotonic() - _WORKER_SILENCE_S
        silent = [key for key, (_, seen_s) in self._workers.items() if seen_s < oldest_s]
        for key in silent:
            del self._workers[key]
        return [
            status for status, _ in self._workers.values() if model is None or status.model == model
        ]

    def is_silent(self, worker_id: str) -> bool:
        """Return whether heartbeats of a worker are overdue, or none was ever heard."""
        known = self._workers.get(worker_id)
        return known is None or known[1] < self._clock.monotonic() - _OVERDUE_S

    def queues(self) -> list[QueueStatus]:
        """Return the queues that a scheduler has reported lately."""
        oldest_s = self._clock.monotonic() - _QUEUE_SILENCE_S
        return [status for status, seen_s in self._queues.values() if seen_s >= oldest_s]

    def queue(self, model: str) -> QueueStatus | None:
        """Return the queue of a model, if a scheduler has reported it lately."""
        known = self._queues.get(model)
        if known is None or known[1] < self._clock.monotonic() - _QUEUE_SILENCE_S:
            return None
        return known[0]

    def desired_workers(self, model: str) -> int | None:
        """Return the highest number of workers that any scheduler wants for a model; None without
        recent reports.
        """
        return self._wanted.of(model, self._clock.monotonic())

    def check_queue(self, model: str) -> None:
        """Raise QueueFullError while the model's queue is over its bound. A missing worker is no
        reason: jobs wait for the worker that the schedulers want started.
        """
        status = self.queue(model)
        if status is not None and status.is_full:
            raise QueueFullError(
                f"{status.num_bounded} requests for {model!r} are waiting and the bound is "
                f"{status.bound}. Try again later.",
                max(status.retry_after_s, _MIN_RETRY_AFTER_S),
            )
