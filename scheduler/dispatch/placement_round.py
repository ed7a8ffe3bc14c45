"""Where the jobs of one model go, in one round of sending."""

from __future__ import annotations

from typing import NamedTuple

from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.preemption import PreemptionPolicy
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, refused
from millrace.scheduler.placement import placement, roles
from millrace.scheduler.placement.kv_sources import KvHolders
from millrace.schemas.errors import AdapterError, ContextLengthError
from millrace.schemas.transfer import KvSource

# Jobs that fit nowhere just now, and yet let others go, in a round.
_MAX_KEPT_FOR = 16
_NO_SLOTS = "The workers of the model {} take no adapters; engine.max_adapters says how many."


class Place(NamedTuple):
    """The worker for a job: so many of its tokens are in that one's cache, so many more are to be
    pulled from ``kv_source``."""

    worker: WorkerView
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    kv_source: KvSource | None = None


class PlacementRound:
    """Finds the worker for each job. One that is too large for what is free anywhere may have a
    worker kept for it: that one's requests end, and it gets no others meanwhile but those that may
    go before it."""

    def __init__(
        self, context: SchedulerContext, model: str, preemption: PreemptionPolicy | None = None
    ) -> None:
        self._context = context
        self._model = model
        self._preemption = preemption
        self._kept: dict[str, list[ScheduledJob]] = {}
        self._num_kept_for = 0

    def find(self, scheduled: ScheduledJob) -> Place | None:
        """The place for a job that waits."""
        workers = candidates = self._workers(scheduled)
        expected = scheduled.service.output_tokens
        if roles.have_roles(workers):
            candidates = self._in_role(scheduled, workers)
            if not scheduled.ran_before:
                expected = roles.output_tokens_at(candidates, workers, expected)
        return self._choose(scheduled, candidates, workers, scheduled.left_worker_id, expected)

    def find_elsewhere(
        self, scheduled: ScheduledJob, away_from: WorkerView, to_worker_id: str = ""
    ) -> Place | None:
        """The place for a job that leaves a worker, which has all of its context; at
        ``to_worker_id`` alone, if that is given."""
        workers = self._workers(scheduled)
        candidates = [
            worker
            for worker in workers
            if worker is not away_from and to_worker_id in ("", worker.worker_id)
        ]
        if not to_worker_id and roles.have_roles(candidates):
            candidates = roles.for_running(candidates, scheduled.resources)
        return self._choose(scheduled, candidates, workers, away_from.worker_id)

    def find_decoder(
        self, scheduled: ScheduledJob, away_from: WorkerView, to_worker_id: str = ""
    ) -> Place | None:
        """The place for a stream that goes on where there is time for it, behind a prompt that a
        worker has computed; of those alone that decode by their role, or at ``to_worker_id``."""
        workers = self._workers(scheduled)
        candidates = self._decoders(workers, away_from, to_worker_id)
        return self._choose(scheduled, candidates, workers, away_from.worker_id)

    def find_decoder_ahead(
        self, scheduled: ScheduledJob, away_from: WorkerView, to_worker_id: str = ""
    ) -> Place | None:
        """As ``find_decoder``, for a prompt that is being computed: what there is of it so far can
        be pulled."""
        workers = self._workers(scheduled)
        candidates = self._decoders(workers, away_from, to_worker_id)
        return self._choose(scheduled, candidates, workers)

    @staticmethod
    def _decoders(
        workers: list[WorkerView], away_from: WorkerView, to_worker_id: str
    ) -> list[WorkerView]:
        return [
            worker
            for worker in roles.decoders(workers)
            if worker is not away_from and to_worker_id in ("", worker.worker_id)
        ]

    def _in_role(self, scheduled: ScheduledJob, workers: list[WorkerView]) -> list[WorkerView]:
        if scheduled.ran_before:
            return roles.for_running(workers, scheduled.resources)
        cached = self._context.prefixes.cached_tokens(workers, scheduled.prefix_keys)
        return roles.for_new(workers, scheduled.resources, cached)

    def _choose(
        self,
        scheduled: ScheduledJob,
        candidates: list[WorkerView],
        workers: list[WorkerView],
        left_worker_id: str = "",
        expected_output_tokens: float | None = None,
    ) -> Place | None:
        """The best of the candidates, for which any of the workers may hold blocks; None: it makes
        there all that it is expected to make."""
        context, resources = self._context, scheduled.resources
        if not any(worker.fits(resources) for worker in candidates):
            return None
        cached = context.prefixes.cached_tokens(workers, scheduled.prefix_keys)
        if left_worker_id and scheduled.can_be_pulled:
            left = context.fleet.get(left_worker_id)
            if left is not None and left.kv_kind is not None:
                cached[left_worker_id] = resources.num_context_tokens - 1
        worker = placement.choose(
            candidates,
            resources,
            cached,
            expected_output_tokens or scheduled.service.output_tokens,
            context.config.placement,
            context.clock.monotonic(),
            workers,
        )
        return None if worker is None else self._place(worker, cached, workers)

    def _place(
        self, worker: WorkerView, cached: dict[str, int], workers: list[WorkerView]
    ) -> Place:
        num_cached = cached.get(worker.worker_id, 0)
        token_s = placement.prefill_token_s(worker)
        pull = KvHolders(workers, cached).pull(worker, num_cached, token_s)
        if pull is None:
            return Place(worker, num_cached)
        return Place(worker, num_cached, pull.num_tokens, pull.holder.as_source())

    def keep_for(self, scheduled: ScheduledJob) -> bool:
        """Keep a worker for a job that fits nowhere just now; whether others have places that are
        too small for it, so that it need not hold up those who come after it."""
        workers = self._workers(scheduled)
        if self._num_kept_for == _MAX_KEPT_FOR or not any(
            worker.capacity_for(scheduled.job.tier) for worker in workers
        ):
            return False
        self._num_kept_for += 1
        best = placement.soonest(workers, scheduled.resources)
        if best is not None:
            self._kept.setdefault(best.worker_id, []).append(scheduled)
        return True

    def too_long(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Why no worker that there is can ever hold a job, if so."""
        workers = list(self._context.fleet.of_model(self._model))
        takes_adapters = any(worker.status.max_adapters for worker in workers)
        if scheduled.resources.adapter and workers and not takes_adapters:
            return refused(AdapterError(_NO_SLOTS.format(self._model)))
        longest = placement.longest_tokens(workers)
        if longest is None or scheduled.resources.total_tokens <= longest:
            return None
        job = scheduled.job
        max_tokens = job.sampling.max_tokens if job.pooling is None else None
        return refused(ContextLengthError(len(job.prompt_token_ids or ()), max_tokens, longest))

    def _workers(self, scheduled: ScheduledJob) -> list[WorkerView]:
        workers = self._context.fleet.of_model(self._model)
        if not self._kept:
            return list(workers)
        return [worker for worker in workers if self._is_open_to(scheduled, worker.worker_id)]

    def _is_open_to(self, scheduled: ScheduledJob, worker_id: str) -> bool:
        kept_for = self._kept.get(worker_id, ())
        preemption = self._preemption
        return not kept_for or (
            preemption is not None and all(preemption.may_pass(scheduled, one) for one in kept_for)
        )
