"""Where the jobs of one model go, in one round of sending."""

from __future__ import annotations

from scheduler import placement
from scheduler.entry import Entry
from scheduler.parts import Parts
from scheduler.worker_view import WorkerView

# Jobs that fit nowhere just now, and yet let others go, in a round.
_MAX_KEPT_FOR = 16


class Places:
    """Finds the worker for each job. One that is too large for what is free anywhere may have a
    worker kept for it: that one's requests end, and it gets no others meanwhile."""

    def __init__(self, parts: Parts, model: str) -> None:
        self._parts = parts
        self._model = model
        self._kept: set[str] = set()
        self._num_kept_for = 0

    def find(self, entry: Entry) -> tuple[WorkerView, int] | None:
        """The worker for a job, and how many of its tokens are in that one's cache."""
        parts, need = self._parts, entry.need
        workers = self._workers()
        if not any(worker.fits(need) for worker in workers):
            return None
        cached = parts.prefixes.cached_tokens(workers, entry.prefix_keys)
        worker = placement.choose(
            workers,
            need,
            cached,
            entry.expected_output_tokens,
            parts.config.placement,
            parts.clock.monotonic(),
        )
        return None if worker is None else (worker, cached.get(worker.worker_id, 0))

    def keep_for(self, entry: Entry) -> bool:
        """Keep a worker for a job that fits nowhere just now; whether others have places that are
        too small for it, so that it need not hold up those who come after it."""
        workers = self._workers()
        if self._num_kept_for == _MAX_KEPT_FOR or not any(
            worker.room_for(entry.job.tier) for worker in workers
        ):
            return False
        self._num_kept_for += 1
        best = placement.soonest(workers, entry.need)
        if best is not None:
            self._kept.add(best.worker_id)
        return True

    def longest_tokens(self) -> int | None:
        """The longest request that any worker can ever hold; None: no limit, or nobody to ask."""
        return placement.longest_tokens(self._parts.fleet.of_model(self._model))

    def _workers(self) -> list[WorkerView]:
        workers = self._parts.fleet.of_model(self._model)
        return [worker for worker in workers if worker.worker_id not in self._kept]
