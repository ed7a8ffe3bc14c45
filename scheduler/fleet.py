"""What the workers are and have room for, as told by heartbeats and by our own dispatches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from scheduler.need import Need
from scheduler.worker_view import DEFAULT_OUTPUT_TOKENS, WorkerView
from schemas.control import WorkerStatus
from schemas.jobs import Tier

_NS_PER_S = 1_000_000_000
_MAX_PAST_LIVES = 4_096


class Departure(StrEnum):
    """Why a life of a worker is over."""

    SILENT = "silent"
    RESTARTED = "restarted"
    RETIRED = "retired"


class Departed(NamedTuple):
    """A worker that is gone, and the requests of ours that it held."""

    worker_id: str
    name: str
    why: Departure
    request_ids: tuple[str, ...]


class Fleet:
    """The live workers. Pure: the caller passes the time in and acts on what is returned.

    A worker is alive from its first fresh heartbeat until it is silent for
    ``heartbeat_timeout_s``, retires, or a new life with its name shows up. One that was only
    silent may come back; an ended life never does.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._workers: dict[str, WorkerView] = {}
        self._by_model: dict[str, dict[str, WorkerView]] = {}
        self._lives: dict[str, str] = {}
        self._stale: OrderedDict[str, int] = OrderedDict()
        self._past: OrderedDict[str, None] = OrderedDict()

    # --- what heartbeats say ---

    def observe(self, status: WorkerStatus, now_s: float, now_ns: int) -> list[Departed]:
        """Take in a heartbeat; the lives that it ends are returned."""
        worker_id = status.worker_id
        if worker_id in self._past:
            return []
        if status.retired:
            self._remember(worker_id)
            return self._depart(worker_id, Departure.RETIRED)
        departed: list[Departed] = []
        former = self._workers.get(self._lives.get(status.name, ""))
        if former is not None and former.worker_id != worker_id:
            if status.started_ns < former.status.started_ns:
                self._remember(worker_id)
                return self._depart(worker_id, Departure.RESTARTED)
            self._remember(former.worker_id)
            departed = self._depart(former.worker_id, Departure.RESTARTED)
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.observe(status, now_s)
        elif self._is_fresh(status, now_ns):
            view = self._workers[worker_id] = WorkerView(status, now_s)
            self._by_model.setdefault(status.model, {})[worker_id] = view
            self._lives[status.name] = worker_id
        return departed

    def _is_fresh(self, status: WorkerStatus, now_ns: int) -> bool:
        """An old status is an entry that a dead worker left, unless a second one follows: then
        the machines' clocks differ."""
        seen_before_ns = self._stale.pop(status.worker_id, None)
        if now_ns - status.sent_ns <= self._timeout_s * _NS_PER_S:
            return True
        if seen_before_ns is not None and seen_before_ns != status.sent_ns:
            return True
        self._stale[status.worker_id] = status.sent_ns
        while len(self._stale) > _MAX_PAST_LIVES:
            self._stale.popitem(last=False)
        return False

    def expire(self, now_s: float) -> list[Departed]:
        """The workers that have been silent for too long; they are gone from now on."""
        silent = [
            worker.worker_id
            for worker in self._workers.values()
            if now_s - worker.seen_s >= self._timeout_s
        ]
        return [gone for worker_id in silent for gone in self._depart(worker_id, Departure.SILENT)]

    def forgive(self, now_s: float) -> None:
        """It was us who could not hear: everybody's silence starts now."""
        for worker in self._workers.values():
            worker.seen_s = now_s

    def _depart(self, worker_id: str, why: Departure) -> list[Departed]:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        del self._by_model[worker.status.model][worker_id]
        if self._lives.get(worker.status.name) == worker_id:
            del self._lives[worker.status.name]
        return [Departed(worker_id, worker.status.name, why, tuple(worker.runs))]

    def _remember(self, worker_id: str) -> None:
        self._past[worker_id] = None
        while len(self._past) > _MAX_PAST_LIVES:
            self._past.popitem(last=False)

    # --- what we know besides ---

    def reserve(
        self,
        worker_id: str,
        request_id: str,
        need: Need,
        expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
        num_cached_tokens: int = 0,
    ) -> None:
        """A request is about to be sent to a live worker, which has so much of it cached."""
        worker = self._workers[worker_id]
        worker.reserve(request_id, need, expected_output_tokens, num_cached_tokens)

    def confirm(self, worker_id: str, request_id: str) -> None:
        """The worker has taken it: the next heartbeat counts it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.confirm(request_id)

    def release(self, worker_id: str, request_id: str) -> bool:
        """The worker does not hold it (any more); whether we thought that it did."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.release(request_id)

    def refuse(self, worker_id: str, tier: Tier = Tier.ENTERPRISE) -> None:
        """The worker said that it takes nothing of this tier just now: ask no more for it and those
        below before it is heard again."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.refuse(tier)

    # --- what is there ---

    def get(self, worker_id: str) -> WorkerView | None:
        return self._workers.get(worker_id)

    def of_model(self, model: str) -> Iterator[WorkerView]:
        """The live workers of a model."""
        return iter(self._by_model.get(model, {}).values())

    def num_workers(self, model: str) -> int:
        return len(self._by_model.get(model, ()))

    def room(self, model: str, tier: Tier = Tier.BATCH) -> int:
        """How many more requests of a tier the workers of a model would take now."""
        return sum([worker.room_for(tier) for worker in self.of_model(model)])

    def num_held(self, model: str) -> int:
        """Requests that the workers of a model run or have waiting."""
        return sum([worker.num_held for worker in self.of_model(model)])

    def num_taking(self, model: str) -> int:
        """Workers of a model that do not drain."""
        return sum(not worker.status.draining for worker in self.of_model(model))

    def num_slots(self, model: str) -> int:
        """How many sequences one worker of a model runs at a time, on the average."""
        slots = [worker.status.max_num_sequences for worker in self.of_model(model)]
        return round(sum(slots) / len(slots)) if slots else 0

    def kv_share(self, model: str) -> float:
        """How much of the KV blocks of a model's workers is used."""
        workers = list(self.of_model(model))
        num_blocks = sum(worker.status.num_blocks for worker in workers)
        num_free = sum(worker.status.num_free_blocks for worker in workers)
        return 1 - num_free / num_blocks if num_blocks else 0.0

    def doubtful(self) -> Iterable[WorkerView]:
        """Workers that keep reporting fewer requests than we think they hold."""
        return [worker for worker in self._workers.values() if worker.is_doubtful]

    def check_integrity(self) -> None:
        """A live worker is its name's one life; AssertionError otherwise."""
        assert len(self._lives) == len(self._workers), "a name with two lives"
        for name, worker_id in self._lives.items():
            assert self._workers[worker_id].status.name == name, "a life under another's name"
            assert worker_id not in self._past, "a past life is alive"
        indexed = [view for views in self._by_model.values() for view in views.values()]
        assert sorted(map(id, indexed)) == sorted(map(id, self._workers.values()))
        for worker in self._workers.values():
            worker.check_integrity()
