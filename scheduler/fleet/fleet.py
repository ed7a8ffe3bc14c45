"""Live workers and their capacity, from heartbeats and this scheduler's dispatches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.schemas.control import WorkerStatus
from millrace.schemas.jobs import Tier

_NS_PER_S = 1_000_000_000
_MAX_PAST_WORKERS = 4_096


class Departure(StrEnum):
    """Reason why an incarnation of a worker is over."""

    SILENT = "silent"
    RESTARTED = "restarted"
    RETIRED = "retired"


class Departed(NamedTuple):
    """Departed worker: its last heartbeat, and this scheduler's requests that it held."""

    worker_id: str
    name: str
    why: Departure
    request_ids: tuple[str, ...]
    status: WorkerStatus


class Fleet:
    """Live workers. Pure: the caller passes the time and acts on the returned values.

    A worker is alive from its first fresh heartbeat until it is silent for ``heartbeat_timeout_s``,
    retires, or a new incarnation of its name appears. A silent worker may come back. A replaced
    incarnation may come back if it is heard again ``heartbeat_timeout_s`` later: then two running
    workers share the name. A retired worker never comes back.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._workers: dict[str, WorkerView] = {}
        self._by_model: dict[str, dict[str, WorkerView]] = {}
        self._by_name: dict[str, set[str]] = {}
        self._stale: OrderedDict[str, int] = OrderedDict()
        self._past: OrderedDict[str, float] = OrderedDict()

    # --- heartbeats ---

    def observe(self, status: WorkerStatus, now_s: float, now_ns: int) -> list[Departed]:
        """Record a heartbeat and return the incarnations that it ends."""
        worker_id = status.worker_id
        if now_s < self._past.get(worker_id, float("-inf")):
            return []
        if status.retired:
            self._past_until(worker_id, float("inf"))
            return self._depart(worker_id, Departure.RETIRED)
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.observe(status, now_s)
            return []
        departed: list[Departed] = []
        if worker_id not in self._past:
            if self._is_former(status):
                self._past_until(worker_id, now_s + self._timeout_s)
                return []
            departed = self._end_former(status, now_s)
        if self._is_fresh(status, now_ns):
            view = self._workers[worker_id] = WorkerView(status, now_s)
            self._by_model.setdefault(status.model, {})[worker_id] = view
            self._by_name.setdefault(status.name, set()).add(worker_id)
        return departed

    def _is_former(self, status: WorkerStatus) -> bool:
        """Return whether a later incarnation of the name is alive."""
        known = [self._workers[worker_id] for worker_id in self._by_name.get(status.name, ())]
        return any(status.started_ns < one.status.started_ns for one in known)

    def _end_former(self, status: WorkerStatus, now_s: float) -> list[Departed]:
        """Depart earlier incarnations of a name, as a new one has appeared."""
        departed: list[Departed] = []
        for worker_id in sorted(self._by_name.get(status.name, ())):
            self._past_until(worker_id, now_s + self._timeout_s)
            departed += self._depart(worker_id, Departure.RESTARTED)
        return departed

    def _is_fresh(self, status: WorkerStatus, now_ns: int) -> bool:
        """Return whether a status is recent enough to prove that the worker is alive.

        An old status usually remains in the bucket from a dead worker. If a second, different one
        follows, the worker is alive and the machines' clocks differ.
        """
        seen_before_ns = self._stale.pop(status.worker_id, None)
        if now_ns - status.sent_ns <= self._timeout_s * _NS_PER_S:
            return True
        if seen_before_ns is not None and seen_before_ns != status.sent_ns:
            return True
        self._stale[status.worker_id] = status.sent_ns
        while len(self._stale) > _MAX_PAST_WORKERS:
            self._stale.popitem(last=False)
        return False

    def expire(self, now_s: float) -> list[Departed]:
        """Remove and return the workers that have been silent for too long."""
        silent = [
            worker.worker_id
            for worker in self._workers.values()
            if now_s - worker.seen_s >= self._timeout_s
        ]
        return [gone for worker_id in silent for gone in self._depart(worker_id, Departure.SILENT)]

    def give_up(self, worker_id: str) -> list[Departed]:
        """Remove a worker whose silence, counted from before it was known here, is too long."""
        return self._depart(worker_id, Departure.SILENT)

    def forgive(self, now_s: float) -> None:
        """Restart every worker's silence now, as this process was disconnected."""
        for worker in self._workers.values():
            worker.seen_s = now_s

    def _depart(self, worker_id: str, why: Departure) -> list[Departed]:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        del self._by_model[worker.status.model][worker_id]
        incarnations = self._by_name[worker.status.name]
        incarnations.discard(worker_id)
        if not incarnations:
            del self._by_name[worker.status.name]
        return [Departed(worker_id, worker.status.name, why, tuple(worker.runs), worker.status)]

    def _past_until(self, worker_id: str, until_s: float) -> None:
        """Ignore heartbeats of a departed worker that arrive before ``until_s``."""
        self._past[worker_id] = until_s
        self._past.move_to_end(worker_id)
        while len(self._past) > _MAX_PAST_WORKERS:
            self._past.popitem(last=False)

    # --- corrections ---

    def release(self, worker_id: str, request_id: str) -> bool:
        """Release a request at a worker; return whether the worker was thought to hold it."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.release(request_id)

    def refuse(self, worker_id: str, tier: Tier = Tier.ENTERPRISE) -> None:
        """Note that a worker refused a tier: it gets no such job or lower until its next
        heartbeat."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.refuse(tier)

    # --- queries ---

    def get(self, worker_id: str) -> WorkerView | None:
        return self._workers.get(worker_id)

    def of_model(self, model: str) -> Iterator[WorkerView]:
        """Yield the live workers of a model."""
        return iter(self._by_model.get(model, {}).values())

    def num_workers(self, model: str) -> int:
        return len(self._by_model.get(model, ()))

    def capacity(self, model: str, tier: Tier = Tier.BATCH) -> int:
        """Return how many more requests of a tier the workers of a model would take now."""
        return sum([worker.capacity_for(tier) for worker in self.of_model(model)])

    def num_held(self, model: str) -> int:
        """Return how many requests the workers of a model run or have waiting."""
        return sum([worker.num_held for worker in self.of_model(model)])

    def num_accepting(self, model: str) -> int:
        """Return the number of a model's workers that do not drain."""
        return sum(not worker.status.draining for worker in self.of_model(model))

    def num_slots(self, model: str) -> int:
        """Return the mean number of slots of a model's workers."""
        slots = [worker.status.max_num_sequences for worker in self.of_model(model)]
        return round(sum(slots) / len(slots)) if slots else 0

    def kv_share(self, model: str) -> float:
        """Return the used share of the KV blocks of a model's workers, 0 to 1."""
        workers = list(self.of_model(model))
        num_blocks = sum(worker.status.num_blocks for worker in workers)
        num_free = sum(worker.status.num_free_blocks for worker in workers)
        return 1 - num_free / num_blocks if num_blocks else 0.0

    def doubtful(self) -> Iterable[WorkerView]:
        """Return workers that keep reporting fewer requests than they are thought to hold."""
        return [worker for worker in self._workers.values() if worker.is_doubtful]
