"""One model's jobs that wait, and the order in which they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.job_runner import JobRunner
from millrace.scheduler.dispatch.migration import Migration
from millrace.scheduler.dispatch.placement_round import Place, PlacementRound
from millrace.scheduler.dispatch.preemption import PreemptionPolicy
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.prompt_keys import PromptKeys
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob, Tenant
from millrace.scheduler.queues.arrivals import Arrivals
from millrace.scheduler.queues.fair_queue import FairQueue
from millrace.scheduler.queues.output_lengths import OutputLengths
from millrace.scheduler.queues.throughput import Throughput
from millrace.schemas.control import Served
from millrace.schemas.jobs import Tier


class Dispatcher:
    """Sends the jobs of one model to its workers as there is capacity for them.

    ``runner`` has a job from when a worker was chosen for it. All of ``wakes`` are set whenever
    something changed that may let a pull go on, ``has_waiting`` when a job has to wait.
    """

    def __init__(self, context: SchedulerContext, model: str) -> None:
        self.model = model
        self.wakes: list[asyncio.Event] = []
        self.has_waiting = asyncio.Event()
        self.throughput = Throughput()
        self.queue = FairQueue(context.config)
        self.output_lengths = OutputLengths()
        self.arrivals = Arrivals(context.clock.monotonic())
        self.runner = JobRunner(
            context, self.queue, self.has_waiting.set, self.dispatch_ready, self._wake
        )
        self._context = context
        self._preemption = PreemptionPolicy(context, model, self.queue, self.dispatch_ready)
        self._migration = Migration(context, model, self._migrate)
        self._stopped = False

    # --- capacity ---

    @property
    def is_served(self) -> bool:
        """There are workers, and jobs may be sent to them."""
        return not self._stopped and self._context.fleet.num_accepting(self.model) > 0

    def num_here(self, *, is_batch: bool) -> int:
        """Jobs that were pulled and not sent so far, of batches or of the others."""
        return sum([self.queue.num_here(tier) for tier in Tier if (tier is Tier.BATCH) is is_batch])

    def spare_capacity(self, tier: Tier) -> int:
        """How many jobs of a tier could be sent now beside those that are here and go first."""
        if self._stopped:
            return 0
        capacity = self._context.fleet.capacity(self.model, tier) - self.num_here(is_batch=False)
        return capacity - self.num_here(is_batch=True) if tier is Tier.BATCH else capacity

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._migration.stop()

    # --- jobs that are ready ---

    def enqueue(self, scheduled: ScheduledJob) -> None:
        """A prepared job waits for a worker."""
        self._estimate_service(scheduled)
        scheduled.enter(Phase.WAITING)
        self.queue.push(scheduled)
        self.dispatch_ready()
        if scheduled in self.queue:
            self.has_waiting.set()

    def continue_where_it_runs(self, scheduled: ScheduledJob, worker_id: str) -> None:
        """A job that was delivered again is with a live worker."""
        if scheduled.phase is Phase.PREPARING:
            self._estimate_service(scheduled)
        self.runner.continue_where_it_runs(scheduled, worker_id)

    def _estimate_service(self, scheduled: ScheduledJob) -> None:
        resources = scheduled.resources
        expected = self.output_lengths.expected_output(
            scheduled.job.tenant, resources.num_new_tokens
        )
        scheduled.service.output_tokens = expected
        scheduled.service.tokens = self._service_tokens(resources.num_context_tokens, expected)
        scheduled.prefix_keys = PromptKeys.of_job(scheduled.job)
        self.arrivals.note(scheduled, self._context.clock.monotonic())

    def _service_tokens(self, prompt_tokens: float, output_tokens: float) -> float:
        return prompt_tokens + self._context.config.output_weight * output_tokens

    def dispatch_ready(self) -> None:
        """Send what there is capacity for, in the order of the queue.

        A job that is too large for what is free lets others go, but to other workers than the one
        that it waits for. One for whose tier there is no capacity lets those of higher tiers go.
        """
        context, preemption = self._context, self._preemption
        preemption.begin_round()
        placement_round = PlacementRound(context, self.model, preemption)
        while context.bus.connected and not self._stopped:
            scheduled = self.queue.head(preemption.above)
            if scheduled is None:
                break
            terminal_status = context.why_unwanted(scheduled)
            if terminal_status is not None:
                self.runner.finish(scheduled, terminal_status)
            elif not preemption.may_go(scheduled):
                break
            elif (place := placement_round.find(scheduled)) is not None:
                self._send(scheduled, place)
            elif (terminal_status := placement_round.too_long(scheduled)) is not None:
                self.runner.finish(scheduled, terminal_status)
            elif placement_round.keep_for(scheduled):
                self.queue.pass_over(scheduled)
            else:
                preemption.hold_up(scheduled)
        preemption.end_round()
        self.queue.restore_passed()
        self._wake()

    def _send(self, scheduled: ScheduledJob, place: Place) -> None:
        self.queue.remove(scheduled)
        self._preemption.has_turn(scheduled.job.tier)
        self.runner.start(scheduled, place)

    def finish_unwanted(self) -> None:
        """End what was cancelled or came too late while it waited."""
        for scheduled in self.queue:
            terminal_status = self._context.why_unwanted(scheduled)
            if terminal_status is not None:
                self.runner.finish(scheduled, terminal_status)
        self.dispatch_ready()

    def _wake(self) -> None:
        for wake in self.wakes:
            wake.set()

    # --- what workers say ---

    def charge_served(self, served: Served, worker_id: str) -> None:
        """What an attempt really took, ours or not."""
        tokens = self._service_tokens(
            served.prompt_tokens - served.cached_tokens, served.completion_tokens
        )
        scheduled = self._context.job_table.get(served.request_id)
        if scheduled is None:
            self._preemption.has_turn(served.tier)
        elif scheduled.worker_id == worker_id:
            self.queue.refund_attempt(scheduled)
        self.queue.charge(Tenant(served.tier, served.tenant), tokens)
        if served.completion_tokens:
            self.output_lengths.observe(served.tenant, served.completion_tokens)

    def migrate_from(self, worker: WorkerView) -> None:
        """Have others go on with what a worker runs that drains, or whose engine is down."""
        if not self._stopped and self._context.bus.connected:
            self._migration.begin(worker)

    def move_streams(self, worker: WorkerView, to_worker_id: str) -> None:
        """Have others, or one of them, go on with what a worker runs now."""
        if not self._stopped and self._context.bus.connected:
            self._migration.move(worker, to_worker_id)

    def hand_on(self, worker: WorkerView, request_ids: Iterable[str]) -> None:
        """Have workers that decode go on with streams whose prompts a worker has computed."""
        if not self._stopped and self._context.bus.connected:
            self._migration.hand_on(worker, request_ids)

    def bring_ahead(self, worker: WorkerView) -> None:
        """Have workers that decode pull what a worker has computed of prompts that it goes on
        with."""
        if not self._stopped and self._context.bus.connected:
            self._migration.bring_ahead(worker)

    def _migrate(self, scheduled: ScheduledJob, place: Place) -> None:
        self.runner.take_from_worker(scheduled, has_source=place.kv_source is not None)
        self._send(scheduled, place)
