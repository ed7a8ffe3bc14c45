"""Shared state of one scheduler's stages: jobs, workers, and a queue for each model."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from millrace.bus.api import Bus
from millrace.bus.fleet.directories import Directories
from millrace.runtime.clock import Clock
from millrace.runtime.histogram import FIRST_TOKEN_S, STEP_S, Histogram
from millrace.runtime.tasks import Tasks
from millrace.scheduler.fleet.fleet import Departure, Fleet
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.cancels import CancelMemory, KeptCancels
from millrace.scheduler.jobs.model_cache import ModelCache
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import JobTable, ScheduledJob
from millrace.scheduler.jobs.tenant_lines import TenantLines
from millrace.scheduler.jobs.terminal_status import (
    EXPIRED,
    TerminalStatus,
    cancelled,
    refused,
)
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.placement.prefix_index import PrefixIndex
from millrace.scheduler.queues.fair_queue import FairQueue
from millrace.scheduler.queues.measurements import ArrivalRates, OutputLengths, Throughput
from millrace.scheduler.queues.preemption import PreemptionPolicy
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status


class Rerun(StrEnum):
    """Reason why a job leaves its worker for another."""

    MOVED = "moved"  # the worker drains, and another has capacity
    LOST = "lost"  # the worker is gone without notice, or did not answer
    RETURNED = "returned"  # the worker gave it back


class DispatchResult(StrEnum):
    """Result of a dispatch; the value is its metric label."""

    ACCEPTED = "accepted"  # the worker holds the lease
    REFUSED = "refused"  # nothing ran: another worker, or later
    LOST = "lost"  # no answer: it may run there
    ANSWERED = "answered"  # an earlier attempt had ended it already
    SUPERSEDED = "overtaken"  # another scheduler runs it at a higher epoch
    POISON_PILL = "poisonous"  # it kills workers
    UNSENT = "unsent"  # the message bus was unreachable
    MUST_END = "ends"  # it must not run: see the terminal status


class MovedBy(StrEnum):
    """Way in which the next worker gets the context of a moved stream."""

    PULLED = "pulled"
    COMPUTED = "computed"


class DispatchCounts:
    """Counts of one model's dispatches and attempts, read at a scrape.

    ``dispatches`` counts by result. ``dispatch_wait_s`` is the time from a request's receipt until
    a worker first accepted it. ``dispatch_s`` is the time until workers answered a dispatch.
    ``moves`` counts moved streams.
    """

    def __init__(self) -> None:
        self.dispatches: Counter[DispatchResult] = Counter()
        self.reruns: Counter[Rerun] = Counter()
        self.moves: Counter[MovedBy] = Counter()
        self.dispatch_wait_s = {tier: Histogram(FIRST_TOKEN_S) for tier in Tier}
        self.dispatch_s = Histogram(STEP_S)


class ModelQueue:
    """Waiting jobs of one model, and the measurements of all its jobs.

    ``wakes`` are the events of the model's pullers. ``has_waiting`` is set when a job has to wait
    for a worker.
    """

    def __init__(self, model: str, config: SchedulerConfig, fleet: Fleet, clock: Clock) -> None:
        self.model = model
        self.queue = FairQueue(config)
        self.preemption = PreemptionPolicy(model, self.queue, config, fleet, clock)
        self.wakes: list[asyncio.Event] = []
        self.has_waiting = asyncio.Event()
        self.throughput = Throughput()
        self.output_lengths = OutputLengths()
        self.arrivals = ArrivalRates(clock.monotonic())
        self.counts = DispatchCounts()
        self.is_stopped = False
        self._fleet = fleet

    @property
    def is_served(self) -> bool:
        """True if there are workers, and jobs may be sent to them."""
        return not self.is_stopped and self._fleet.num_accepting(self.model) > 0

    def num_here(self, *, is_batch: bool) -> int:
        """Return how many jobs were pulled and not sent, of the batch tier or of all others."""
        return sum([self.queue.num_here(tier) for tier in Tier if (tier is Tier.BATCH) is is_batch])

    def spare_capacity(self, tier: Tier) -> int:
        """Return how many more jobs of a tier could be sent now behind the jobs that are here."""
        if self.is_stopped:
            return 0
        capacity = self._fleet.capacity(self.model, tier) - self.num_here(is_batch=False)
        return capacity - self.num_here(is_batch=True) if tier is Tier.BATCH else capacity

    def wake_pulls(self) -> None:
        """Wake the pullers, as a pull may now be possible."""
        for wake in self.wakes:
            wake.set()


@dataclass(eq=False)
class SchedulerState:
    """Shared state of one scheduler.

    ``model_queues`` has the models that are served now. ``gone_queues`` has models that left the
    catalogue, until their jobs have ended. ``tasks`` owns the work on single jobs. ``answers`` owns
    messages that are sent by no other means. Without an ``admission`` every job is admitted.
    ``num_ended`` counts jobs that no worker answered, by model, status and code. ``queue_news`` is
    set when the queue should be counted soon.
    """

    bus: Bus
    config: SchedulerConfig
    clock: Clock
    running_requests: RunningRequests
    model_cache: ModelCache
    directories: Directories
    traces: JobTraces | None
    admission: JobAdmission | None

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.config.heartbeat_timeout_s)
        self.prefixes = PrefixIndex(self.config.max_prefix_keys)
        self.cancels = CancelMemory(self.config.cancel_memory_s)
        self.job_table = JobTable()
        self.tasks = Tasks()
        self.answers = Tasks()
        self.kept_cancels = KeptCancels(self.running_requests, self.cancels, self.clock, self.tasks)
        self.lines = TenantLines(self.admission, self.clock, self.tasks)
        self.model_queues: dict[str, ModelQueue] = {}
        self.gone_queues: dict[str, ModelQueue] = {}
        self.departures: Counter[Departure] = Counter()
        self.num_ended: Counter[tuple[str, Status, str]] = Counter()
        self.queue_news = asyncio.Event()
        # Number of readers that follow the answer of each request's first job.
        self.followers: Counter[str] = Counter()

    def count_queue_soon(self) -> None:
        """Request a count of the queue, as there may be jobs again."""
        self.queue_news.set()

    def add_model(self, model: str) -> ModelQueue:
        """Start serving a model."""
        self.gone_queues.pop(model, None)
        model_queue = ModelQueue(model, self.config, self.fleet, self.clock)
        self.model_queues[model] = model_queue
        return model_queue

    def remove_model(self, model: str) -> None:
        """Stop serving a model. Its jobs here are unwanted from now on."""
        self.gone_queues[model] = self.model_queues.pop(model)

    def queue_of(self, scheduled: ScheduledJob) -> ModelQueue:
        """Return the queue of a job's model, which may have left the catalogue."""
        model = scheduled.job.model
        return self.model_queues.get(model) or self.gone_queues[model]

    def all_queues(self) -> list[ModelQueue]:
        """Return the queues of all models, including models that left the catalogue."""
        return [*self.model_queues.values(), *self.gone_queues.values()]

    async def is_foreign_reply(self, tenant: str, reply: str) -> bool:
        """Return whether a tenant's job names another tenant's listener."""
        return await self.directories.reply_owners.is_foreign(tenant, reply)

    def cancel_reason(self, scheduled: ScheduledJob) -> CancelReason | None:
        """Return why a job was cancelled; None if it was not."""
        tenant, request_id = scheduled.job.tenant, scheduled.request_id
        return self.cancels.reason(tenant, request_id, self.clock.monotonic())

    def why_unwanted(self, scheduled: ScheduledJob) -> TerminalStatus | None:
        """Return the terminal status of a cancelled or late job, or of a removed model's; else
        None."""
        reason = self.cancel_reason(scheduled)
        if reason is not None:
            return cancelled(reason)
        if scheduled.job.is_past_deadline(self.clock.now_ns()):
            return EXPIRED
        if scheduled.job.model in self.gone_queues:
            return refused(
                ModelNotFoundError(f"The model {scheduled.job.model!r} is no longer served.")
            )
        return None
