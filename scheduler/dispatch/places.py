"""Where the jobs of one model go, in one round of sending."""

from __future__ import annotations

from scheduler.dispatch.context import Parts
from scheduler.dispatch.preemption import Overtaking
from scheduler.fleet.worker_view import WorkerView
from scheduler.jobs.entry import Entry
from scheduler.jobs.terminal_status import Verdict, refused
from scheduler.placement import placement
from schemas.errors import ContextLengthError

# Jobs that fit nowhere just now, and yet let others go, in a round.
_MAX_KEPT_FOR = 16


class Places:
    """Finds the worker for each job. One that is too large for what is free anywhere may have a
    worker kept for it: that one's requests end, and it gets no others meanwhile but those that may
    go before it."""

    def __init__(self, parts: Parts, model: str, overtaking: Overtaking | None = None) -> None:
        self._parts = parts
        self._model = model
        self._overtaking = overtaking
        self._kept: dict[str, list[Entry]] = {}
        self._num_kept_for = 0

    def find(self, entry: Entry) -> tuple[WorkerView, int] | None:
        """The worker for a job, and how many of its tokens are in that one's cache."""
        parts, need = self._parts, entry.need
        workers = self._workers(entry)
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
        workers = self._workers(entry)
        if self._num_kept_for == _MAX_KEPT_FOR or not any(
            worker.room_for(entry.job.tier) for worker in workers
        ):
            return False
        self._num_kept_for += 1
        best = placement.soonest(workers, entry.need)
        if best is not None:
            self._kept.setdefault(best.worker_id, []).append(entry)
        return True

    def too_long(self, entry: Entry) -> Verdict | None:
        """Why no worker that there is can ever hold a job, if so."""
        longest = placement.longest_tokens(self._parts.fleet.of_model(self._model))
        if longest is None or entry.need.total_tokens <= longest:
            return None
        job = entry.job
        max_tokens = job.sampling.max_tokens if job.pooling is None else None
        return refused(ContextLengthError(len(job.prompt_token_ids or ()), max_tokens, longest))

    def _workers(self, entry: Entry) -> list[WorkerView]:
        workers = self._parts.fleet.of_model(self._model)
        if not self._kept:
            return list(workers)
        return [worker for worker in workers if self._is_open_to(entry, worker.worker_id)]

    def _is_open_to(self, entry: Entry, worker_id: str) -> bool:
        kept_for = self._kept.get(worker_id, ())
        overtaking = self._overtaking
        return not kept_for or (
            overtaking is not None and all(overtaking.may_pass(entry, one) for one in kept_for)
        )
