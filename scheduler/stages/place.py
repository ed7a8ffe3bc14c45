"""Placement stage: sends a model's waiting jobs in order, each to its best worker."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.prompt_keys import PromptKeys
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob, Tenant
from millrace.scheduler.jobs.terminal_status import TerminalStatus, refused
from millrace.scheduler.placement import placement
from millrace.scheduler.placement.placement import KvHolders
from millrace.scheduler.queues.preemption import PreemptionPolicy
from millrace.scheduler.stages import end, send
from millrace.scheduler.state import DispatchResult, ModelQueue, SchedulerState
from millrace.schemas.control import Served
from millrace.schemas.errors import AdapterError, ContextLengthError
from millrace.schemas.transfer import KvSource

# Jobs in a round that fit nowhere now and still let others pass.
_MAX_KEPT_FOR = 16
_NO_SLOTS = "The workers of the model {} take no adapters; set engine.max_adapters above 0."


class Place(NamedTuple):
    """Place of a job: a worker, its cached tokens, and the tokens to pull from ``kv_source``."""

    worker: WorkerView
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    kv_source: KvSource | None = None


class PlacementRound:
    """Round of placement of a model's jobs.

    A job that is too large for the free capacity may have a worker kept for it. That worker's
    requests end, and it gets only jobs that may go before the large one.
    """

    def __init__(
        self, state: SchedulerState, model: str, preemption: PreemptionPolicy | None = None
    ) -> None:
        self._state = state
        self._model = model
        self._preemption = preemption
        self._kept: dict[str, list[ScheduledJob]] = {}
        self._num_kept_for = 0

    def find(self, scheduled: ScheduledJob) -> Place | None:
        """Return the place of a waiting job; None if no worker has room."""
        workers = candidates = self._workers(scheduled)
        expected = scheduled.service.output_tokens
        if placement.have_roles(workers):
            candidates = self._in_role(scheduled, workers)
            if not scheduled.ran_before:
                expected = placement.output_tokens_at(candidates, workers, expected)
        return self._choose(scheduled, candidates, workers, scheduled.left_worker_id, expected)

    def find_elsewhere(
        self, scheduled: ScheduledJob, away_from: WorkerView, to_worker_id: str = ""
    ) -> Place | None:
        """Return the place of a job that leaves a worker, which has all of its context.

        ``to_worker_id``: the only worker allowed, if not empty.
        """
        workers = self._workers(scheduled)
        candidates = [
            worker
            for worker in workers
            if worker is not away_from and to_worker_id in ("", worker.worker_id)
        ]
        if not to_worker_id and placement.have_roles(candidates):
            candidates = placement.for_running(candidates, scheduled.resources)
        return self._choose(scheduled, candidates, workers, away_from.worker_id)

    def find_decoder(
        self,
        scheduled: ScheduledJob,
        away_from: WorkerView,
        to_worker_id: str = "",
        *,
        is_ahead: bool = False,
    ) -> Place | None:
        """Return the place of a prefilled job at a worker that decodes.

        ``is_ahead``: the prompt is still being computed, and its computed part can be pulled.
        """
        workers = self._workers(scheduled)
        candidates = [
            worker
            for worker in placement.decoders(workers)
            if worker is not away_from and to_worker_id in ("", worker.worker_id)
        ]
        left_worker_id = "" if is_ahead else away_from.worker_id
        return self._choose(scheduled, candidates, workers, left_worker_id)

    def _in_role(self, scheduled: ScheduledJob, workers: list[WorkerView]) -> list[WorkerView]:
        if scheduled.ran_before:
            return placement.for_running(workers, scheduled.resources)
        cached = self._state.prefixes.cached_tokens(workers, scheduled.prefix_keys)
        return placement.for_new(workers, scheduled.resources, cached)

    def _choose(
        self,
        scheduled: ScheduledJob,
        candidates: list[WorkerView],
        workers: list[WorkerView],
        left_worker_id: str = "",
        expected_output_tokens: float | None = None,
    ) -> Place | None:
        """Return the best candidate; blocks may be pulled from any of the workers.

        ``expected_output_tokens`` defaults to the job's expected output.
        """
        state, resources = self._state, scheduled.resources
        if not any(worker.fits(resources) for worker in candidates):
            return None
        cached = state.prefixes.cached_tokens(workers, scheduled.prefix_keys)
        if left_worker_id and scheduled.can_be_pulled:
            left = state.fleet.get(left_worker_id)
            if left is not None and left.kv_kind is not None:
                cached[left_worker_id] = resources.num_context_tokens - 1
        worker = placement.choose(
            candidates,
            resources,
            cached,
            expected_output_tokens or scheduled.service.output_tokens,
            state.config.placement,
            state.clock.monotonic(),
            workers,
        )
        if worker is None:
            return None
        num_cached = cached.get(worker.worker_id, 0)
        token_s = placement.prefill_token_s(worker)
        pull = KvHolders(workers, cached).pull(worker, num_cached, token_s)
        if pull is None:
            return Place(worker, num_cached)
        return Place(worker, num_cached, pull.num_tokens, pull.holder.as_source())

    def keep_for(self, scheduled: ScheduledJob) -> bool:
        """Keep a worker for a job that fits nowhere now.

        Returns:
            True if workers have capacity that is too small for this job, so later jobs may pass it.
        """
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
        """Return the refusal of a job that no present worker can ever hold; None if one can."""
        workers = list(self._state.fleet.of_model(self._model))
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
        workers = self._state.fleet.of_model(self._model)
        if not self._kept:
            return list(workers)
        return [worker for worker in workers if self._is_open_to(scheduled, worker.worker_id)]

    def _is_open_to(self, scheduled: ScheduledJob, worker_id: str) -> bool:
        kept_for = self._kept.get(worker_id, ())
        preemption = self._preemption
        return not kept_for or (
            preemption is not None and all(preemption.may_pass(scheduled, one) for one in kept_for)
        )


# --- jobs that wait ---


def enqueue(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Queue a prepared job for a worker."""
    model_queue = state.queue_of(scheduled)
    _estimate_service(state, scheduled)
    scheduled.enter(JobPhase.WAITING)
    model_queue.queue.push(scheduled)
    dispatch_ready(state, model_queue)
    if scheduled in model_queue.queue:
        model_queue.has_waiting.set()


def _estimate_service(state: SchedulerState, scheduled: ScheduledJob) -> None:
    resources, model_queue = scheduled.resources, state.queue_of(scheduled)
    expected = model_queue.output_lengths.expected_output(
        scheduled.job.tenant, resources.num_new_tokens
    )
    scheduled.service.output_tokens = expected
    output_tokens = state.config.output_weight * expected
    scheduled.service.tokens = resources.num_context_tokens + output_tokens
    scheduled.prefix_keys = PromptKeys.of_job(scheduled.job)
    model_queue.arrivals.note(scheduled, state.clock.monotonic())


def dispatch_all(state: SchedulerState) -> None:
    """Send the jobs of all models that workers have capacity for."""
    for model_queue in state.model_queues.values():
        dispatch_ready(state, model_queue)


def dispatch_ready(state: SchedulerState, model_queue: ModelQueue) -> None:
    """Send the jobs that workers have capacity for, in the order of the queue.

    A job that is too large for the free capacity lets others pass, to workers other than the one
    kept for it. A job without capacity for its tier lets jobs of higher tiers pass.
    """
    queue, preemption = model_queue.queue, model_queue.preemption
    preemption.begin_round()
    placement_round = PlacementRound(state, model_queue.model, preemption)
    while state.bus.connected and not model_queue.is_stopped:
        scheduled = queue.head(preemption.above)
        if scheduled is None:
            break
        terminal_status = state.why_unwanted(scheduled)
        if terminal_status is not None:
            end.finish(state, scheduled, terminal_status)
        elif not preemption.may_go(scheduled):
            break
        elif (place := placement_round.find(scheduled)) is not None:
            start(state, scheduled, place)
        elif (terminal_status := placement_round.too_long(scheduled)) is not None:
            end.finish(state, scheduled, terminal_status)
        elif placement_round.keep_for(scheduled):
            queue.pass_over(scheduled)
        else:
            preemption.hold_up(scheduled)
    wait_s = preemption.end_round()
    if wait_s is not None:
        later = _dispatch_ready_after(state, model_queue, wait_s)
        state.tasks.spawn(later, f"send more of {model_queue.model}")
    queue.restore_passed()
    model_queue.wake_pulls()


async def _dispatch_ready_after(
    state: SchedulerState, model_queue: ModelQueue, wait_s: float
) -> None:
    try:
        await state.clock.sleep(wait_s)
    finally:
        model_queue.preemption.is_timed = False
    dispatch_ready(state, model_queue)


def finish_unwanted(state: SchedulerState, model_queue: ModelQueue) -> None:
    """End cancelled and late jobs while they wait."""
    for scheduled in model_queue.queue:
        terminal_status = state.why_unwanted(scheduled)
        if terminal_status is not None:
            end.finish(state, scheduled, terminal_status)
    dispatch_ready(state, model_queue)


def charge_served(
    state: SchedulerState, model_queue: ModelQueue, served: Served, worker_id: str
) -> None:
    """Charge a tenant for an attempt's actual service, whichever scheduler sent it."""
    output_tokens = state.config.output_weight * served.completion_tokens
    tokens = served.prompt_tokens - served.cached_tokens + output_tokens
    scheduled = state.job_table.get(served.request_id)
    if scheduled is None:
        model_queue.preemption.has_turn(served.tier)
    elif scheduled.worker_id == worker_id:
        model_queue.queue.refund_attempt(scheduled)
    model_queue.queue.charge(Tenant(served.tier, served.tenant), tokens)
    if served.completion_tokens:
        model_queue.output_lengths.observe(served.tenant, served.completion_tokens)


# --- from the chosen worker to its answer ---


def start(state: SchedulerState, scheduled: ScheduledJob, place: Place) -> None:
    """Send a job to its place."""
    model_queue, worker_id = state.queue_of(scheduled), place.worker.worker_id
    model_queue.queue.remove(scheduled)
    model_queue.preemption.has_turn(scheduled.job.tier)
    _assign(scheduled, worker_id, place)
    num_present_tokens = place.num_cached_tokens + place.num_pulled_tokens
    model_queue.queue.charge_attempt(scheduled, num_present_tokens)
    sending = send.send(state, scheduled, worker_id)
    state.tasks.spawn(_run(state, scheduled, sending), f"dispatch {scheduled.request_id}")


def migrate(state: SchedulerState, scheduled: ScheduledJob, place: Place) -> None:
    """Take a job from the worker that runs it, and send it to its new place."""
    end.take_from_worker(state, scheduled, has_source=place.kv_source is not None)
    start(state, scheduled, place)


def continue_where_it_runs(state: SchedulerState, scheduled: ScheduledJob, worker_id: str) -> None:
    """Send a redelivered job to the live worker that runs it, under the new lease.

    If the worker does not have the job after all, it is sent like any other.
    """
    if scheduled.phase is JobPhase.PREPARING:
        _estimate_service(state, scheduled)
    worker = state.fleet.get(worker_id)
    state.queue_of(scheduled).queue.remove(scheduled)
    _assign(scheduled, worker_id, None if worker is None else Place(worker))
    sending = send.continue_at(state, scheduled, worker_id)
    state.tasks.spawn(_run(state, scheduled, sending), f"continue {scheduled.request_id}")


def _assign(scheduled: ScheduledJob, worker_id: str, place: Place | None) -> None:
    """Assign a job to a worker. Without a ``place``, this scheduler does not know the worker."""
    scheduled.stop_waiting_here()
    scheduled.enter(JobPhase.DISPATCHING)
    if place is None:
        scheduled.assign(worker_id, 0)
        return
    scheduled.assign(worker_id, place.num_cached_tokens, place.kv_source)
    if scheduled.request_id not in place.worker.runs:
        place.worker.reserve(
            scheduled.request_id,
            scheduled.resources,
            scheduled.service.output_tokens,
            place.num_cached_tokens,
            place.num_pulled_tokens,
        )


async def _run(
    state: SchedulerState,
    scheduled: ScheduledJob,
    sending: Coroutine[Any, Any, send.DispatchOutcome],
) -> None:
    """Send a job, act on the answer, and use the capacity that the job did not take."""
    outcome = await send.outcome_of(state, scheduled, sending)
    send.apply(state, scheduled, outcome)
    if outcome.result is not DispatchResult.UNSENT and scheduled.phase is not JobPhase.RUNNING:
        dispatch_ready(state, state.queue_of(scheduled))
