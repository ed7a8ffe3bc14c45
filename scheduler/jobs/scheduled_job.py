"""Scheduled job: a job that this scheduler answers for, from the pull until its end is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from msgspec.structs import replace

from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.running_requests import JobClaim
from millrace.scheduler.jobs.prompt_keys import NO_KEYS, PromptKeys
from millrace.scheduler.jobs.tracing import JobTrace
from millrace.schemas.control import EPOCHS_PER_DELIVERY, Reservation, Served
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.records import Attempt, sum_energy
from millrace.schemas.transfer import KvSource

# Beyond this number, the two oldest attempts are merged.
MAX_ATTEMPTS_KEPT = 16


class _KnownAttempt(NamedTuple):
    """Known attempt.

    ``is_accepted``: its worker accepted it. ``is_reported``: its usage is known.
    """

    attempt: Attempt
    is_accepted: bool = False
    is_reported: bool = False


@dataclass(slots=True)
class AttemptHistory:
    """Attempts of a job.

    ``epoch`` is the last epoch that began or may have begun, 0 before the first. ``epoch_floor`` is
    the highest known epoch of another scheduler. ``claimed_epoch`` is the last epoch below which
    all workers were told to stop. This scheduler sent ``num_started`` attempts. ``num_lost`` were
    lost with their workers, bounded by ``max_attempts``.

    A worker reports an attempt when it is over. The usage on a worker that was killed is unknown.
    """

    epoch: int = 0
    epoch_floor: int = 0
    claimed_epoch: int = 0
    num_started: int = 0
    num_lost: int = 0
    _by_epoch: dict[int, _KnownAttempt] = field(default_factory=dict)
    _reported: asyncio.Event | None = None

    def __bool__(self) -> bool:
        return bool(self._by_epoch)

    @property
    def highest_epoch(self) -> int:
        """Highest epoch at which this scheduler ran the job or told workers to stop below."""
        return max(self.epoch, self.claimed_epoch)

    def add_sent(self, worker_id: str, sent_ns: int, *, is_accepted: bool) -> None:
        """Add a dispatch of ``epoch`` that a worker accepted or did not answer.

        ``sent_ns`` is the earliest time at which it began.
        """
        if self.epoch not in self._by_epoch:
            attempt = Attempt(epoch=self.epoch, worker_id=worker_id, started_ns=sent_ns)
            self._add(_KnownAttempt(attempt, is_accepted))

    def add_found(self, epoch: int, worker_id: str) -> None:
        """Add another scheduler's attempt, as found in the index."""
        if epoch not in self._by_epoch and worker_id:
            self._add(_KnownAttempt(Attempt(epoch=epoch, worker_id=worker_id)))

    def add_report(self, served: Served, worker_id: str, now_ns: int) -> None:
        """Add a worker's report of an attempt that is over.

        Earlier unreported attempts at that worker were the same one under other epochs.
        """
        if not served.epoch:
            return
        same = [
            epoch
            for epoch, one in self._by_epoch.items()
            if epoch <= served.epoch and one.attempt.worker_id == worker_id and not one.is_reported
        ]
        for epoch in same:
            del self._by_epoch[epoch]
        attempt = Attempt(
            epoch=served.epoch,
            worker_id=worker_id,
            started_ns=served.started_ns,
            ended_ns=now_ns,
            device_us=served.device_us,
            energy_j=served.energy_j,
            cached_tokens=served.cached_tokens,
            pulled_tokens=served.pulled_tokens,
            kv_source=served.kv_source,
        )
        self._add(_KnownAttempt(attempt, is_accepted=True, is_reported=True))
        if self._reported is not None:
            self._reported.set()

    def close(self, now_ns: int) -> None:
        """Mark all open attempts as ended."""
        for epoch, one in self._by_epoch.items():
            if not one.attempt.ended_ns:
                self._by_epoch[epoch] = one._replace(attempt=replace(one.attempt, ended_ns=now_ns))

    def earlier(self, worker_id: str = "") -> tuple[Attempt, ...]:
        """Return all attempts by epoch, without unreported ones at ``worker_id`` (may still
        run)."""
        known = sorted(self._by_epoch.items())
        return tuple(
            one.attempt for _, one in known if one.is_reported or one.attempt.worker_id != worker_id
        )

    @property
    def unreported_worker_id(self) -> str:
        """Worker that accepted the last attempt and has not reported it; empty if there is none."""
        if not self._by_epoch:
            return ""
        last = self._by_epoch[max(self._by_epoch)]
        return last.attempt.worker_id if last.is_accepted and not last.is_reported else ""

    async def wait_for_report(self, timeout_s: float) -> None:
        """Wait until the last attempt is reported, for at most ``timeout_s``."""
        self._reported = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                while self.unreported_worker_id:
                    await self._reported.wait()
                    self._reported.clear()
        except TimeoutError:
            return

    def _add(self, known: _KnownAttempt) -> None:
        self._by_epoch[known.attempt.epoch] = known
        if len(self._by_epoch) > MAX_ATTEMPTS_KEPT:
            first, second = (
                self._by_epoch.pop(epoch).attempt for epoch in sorted(self._by_epoch)[:2]
            )
            device_us = first.device_us + second.device_us
            both = replace(
                first,
                ended_ns=second.ended_ns,
                device_us=device_us,
                energy_j=sum_energy((first.energy_j, second.energy_j)),
                pulled_tokens=first.pulled_tokens + second.pulled_tokens,
                kv_source=second.kv_source or first.kv_source,
            )
            self._by_epoch[first.epoch] = _KnownAttempt(both, is_accepted=True, is_reported=True)


MAX_FAILURES = 2.0
_SURE, _UNSURE = 1.0, 0.5


@dataclass(slots=True, eq=False)
class PoisonSuspicion:
    """Poison suspicion of one job.

    ``failures`` counts the worker deaths that it is suspected of. ``detector`` examines the last of
    them. ``outlived_engine``: an engine died under the job, and no later token is known.
    """

    failures: float = 0.0
    detector: PoisonPillDetector | None = None
    outlived_engine: bool = False


class PoisonPillDetector:
    """Poison pill detector for the death of one worker: checks the progress of each request there.

    A request is a suspect if its client got no new token from that run. A single suspect gets one
    failure, several get half a failure each. A request with two failures is a poison pill. A
    request that progressed is cleared of all failures, so requests that merely live through worker
    deaths are not blamed.
    """

    def __init__(self, suspicions: Iterable[PoisonSuspicion]) -> None:
        self.closed = asyncio.Event()
        self._pending = set(suspicions)
        self._suspects: list[PoisonSuspicion] = []
        for suspicion in self._pending:
            if suspicion.detector is not None:
                suspicion.detector.report(suspicion, progressed=True)
            suspicion.detector = self
        self._close_if_all_reported()

    def report(self, suspicion: PoisonSuspicion, *, progressed: bool) -> None:
        """Record whether a client got new tokens of the lost run.

        A request that is over, or of unknown state, counts as having progressed.
        """
        if suspicion not in self._pending:
            return
        self._pending.remove(suspicion)
        suspicion.detector = None
        if progressed:
            suspicion.failures = 0.0
        else:
            self._suspects.append(suspicion)
        self._close_if_all_reported()

    def _close_if_all_reported(self) -> None:
        if self._pending:
            return
        for suspicion in self._suspects:
            suspicion.failures += _SURE if len(self._suspects) == 1 else _UNSURE
        self._suspects = []
        self.closed.set()


# Blocks are reserved for the present tokens and this many more, not for max_tokens: most
# completions end long before that, and a worker without free blocks preempts.
HEADROOM_TOKENS = 64

# Rank 0 is the most urgent tier. Higher ranks make way.
TIER_RANKS = {tier: rank for rank, tier in enumerate(Tier)}


class ResourceRequest(NamedTuple):
    """Resources that a request needs of a worker.

    ``num_context_tokens`` are to be prefilled: the prompt and delivered tokens. At most
    ``num_new_tokens`` follow, 0 for an embedding. Work below ``tier`` makes way. ``adapter`` is the
    version of its adapter, empty without one.
    """

    num_context_tokens: int
    num_new_tokens: int
    tier: Tier = Tier.FREE
    adapter: str = ""

    @property
    def total_tokens(self) -> int:
        return self.num_context_tokens + self.num_new_tokens

    def num_blocks(self, block_size_tokens: int) -> int:
        """Return the KV blocks that the request will soon hold."""
        tokens = self.num_context_tokens + min(self.num_new_tokens, HEADROOM_TOKENS)
        return -(-tokens // block_size_tokens)


@dataclass(slots=True)
class TenantQueueCounts:
    """Job counts of one tenant queue of one model, as this scheduler knows them.

    - ``num_waiting``: jobs that are thought to be in the queue.
    - ``num_announced``: of these, announced since the last pull. Negative if a waiting pull was
      faster than the announcement.
    - ``num_announced_before``: the same at the beginning of the pull under way.
    - ``num_here``: pulled and not sent.
    - ``num_ours``: pulled and not ended.
    - ``num_others``: not found by the last pull, so other schedulers and their workers have them.
    - ``total``: the last count.
    - ``is_due``: a lease may have lapsed, so a pull is worth a try.
    """

    num_waiting: int = 0
    num_announced: int = 0
    num_announced_before: int = 0
    num_here: int = 0
    num_ours: int = 0
    num_others: int = 0
    total: int = 0
    is_pulled: bool = False
    pulled_s: float = 0.0
    is_due: bool = False
    idle_since_s: float | None = None


class JobPhase(Enum):
    """Phase of a job. This scheduler extends the lease until a worker runs the job."""

    PREPARING = auto()  # pulled; its prompt is tokenized, its admission checked
    HELD = auto()  # the tenant's limits have no place now
    WAITING = auto()  # in the fair queue
    DISPATCHING = auto()  # on its way to a worker
    RUNNING = auto()  # a worker has it, and extends the lease
    ENDED = auto()  # answered, or another scheduler's


_NEXT_PHASES = {
    JobPhase.PREPARING: (JobPhase.HELD, JobPhase.WAITING, JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.HELD: (JobPhase.WAITING, JobPhase.ENDED),
    JobPhase.WAITING: (JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.DISPATCHING: (JobPhase.RUNNING, JobPhase.WAITING, JobPhase.ENDED),
    JobPhase.RUNNING: (JobPhase.WAITING, JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.ENDED: (),
}


class Tenant(NamedTuple):
    """Tenant in one tier, the unit of fair shares."""

    tier: Tier
    name: str

    @classmethod
    def of(cls, tenant_queue: TenantQueue) -> Tenant:
        """Return the tenant of a tenant queue; the name is empty if the subject has none."""
        return cls(tenant_queue.tier, tenant_queue.tenant or "")


@dataclass(slots=True)
class Lease:
    """Lease of a job, as delivered by the queue.

    ``token`` extends, releases or acknowledges the lease. ``is_uncertain``: the job may have run
    before this delivery.
    """

    token: str
    num_deliveries: int
    stream_sequence: int
    tenant_queue: TenantQueue
    is_uncertain: bool = False


@dataclass(slots=True)
class JobTiming:
    """Times of a job.

    ``stored_ns`` is when the queue stored it (UTC epoch). The others are on the monotonic clock:
    when it was pulled, its lease was extended, and its end was last looked up.
    """

    stored_ns: int = 0
    pulled_s: float = 0.0
    extended_s: float = 0.0
    checked_s: float = 0.0


@dataclass(slots=True)
class ClientView:
    """Client's view of a job.

    ``token_ids`` are delivered, and the next attempt continues them. ``num_tokens_at_start`` were
    delivered when the last attempt started. ``announced_position`` is the last published queue
    position.
    """

    token_ids: tuple[int, ...] = ()
    num_tokens_at_start: int = 0
    announced_position: int | None = None


@dataclass(slots=True)
class ExpectedService:
    """Expected service of a prepared job.

    ``output_tokens`` is the expected completion. ``tokens`` is the expected service in all.
    ``charged_tokens`` is charged to the tenant for the attempt under way.
    """

    output_tokens: float = 1.0
    tokens: float = 1.0
    charged_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class ScheduledJob:
    """Job with its state in this scheduler.

    - ``ran_before``: a client may have tokens of an earlier attempt, so ask before running it
      again.
    - ``interrupted``: an earlier attempt was interrupted, as far as is known.
    - ``waits_here``: counted in ``queue_counts.num_here``.
    - ``reservation``: reserved usage of a published job. ``is_reserved_here``: in this process
      only.
    - ``adapter``: adapter of a prepared job, as workers load it.
    - ``left_worker_id``: worker that the job was moved from, whose KV cache has all of it (empty:
      none).
    - ``kv_source``: source from which the job's worker can pull its context.
    """

    job: Job
    lease: Lease
    queue_counts: TenantQueueCounts
    timing: JobTiming
    claim: JobClaim
    ran_before: bool = False
    interrupted: bool = False
    phase: JobPhase = JobPhase.PREPARING
    service: ExpectedService = field(default_factory=ExpectedService)
    tenant: Tenant = field(init=False)
    worker_id: str = field(default="", init=False)
    waits_here: bool = field(default=False, init=False)
    prefix_keys: PromptKeys = field(default=NO_KEYS, init=False)
    client: ClientView = field(default_factory=ClientView, init=False)
    attempts: AttemptHistory = field(default_factory=AttemptHistory, init=False)
    suspicion: PoisonSuspicion = field(default_factory=PoisonSuspicion, init=False)
    trace: JobTrace | None = field(default=None, init=False)
    reservation: Reservation | None = field(default=None, init=False)
    adapter: AdapterRef | None = field(default=None, init=False)
    is_reserved_here: bool = field(default=False, init=False)
    left_worker_id: str = field(default="", init=False)
    kv_source: KvSource | None = field(default=None, init=False)
    _resources: ResourceRequest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tenant = Tenant(self.job.tier, self.job.tenant)

    @classmethod
    def of(cls, leased: LeasedJob, queue_counts: TenantQueueCounts, now_s: float) -> ScheduledJob:
        return cls(
            job=leased.job,
            lease=Lease(
                leased.lease,
                leased.num_deliveries,
                leased.stream_sequence,
                leased.tenant_queue,
                leased.uncertain,
            ),
            queue_counts=queue_counts,
            timing=JobTiming(leased.stored_ns, now_s, now_s),
            claim=JobClaim(sequence=leased.stream_sequence)
            if leased.tenant_queue.reserved
            else JobClaim.of(leased.job, leased.stream_sequence),
            ran_before=leased.num_deliveries > 1,
        )

    # --- what it is ---

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def holds_lease(self) -> bool:
        """True while this scheduler extends the lease."""
        return self.phase in (
            JobPhase.PREPARING,
            JobPhase.HELD,
            JobPhase.WAITING,
            JobPhase.DISPATCHING,
        )

    @property
    def is_ended(self) -> bool:
        return self.phase is JobPhase.ENDED

    @property
    def next_epoch(self) -> int:
        """Epoch of the next attempt, above all earlier ones."""
        attempts = self.attempts
        by_count = (self.lease.num_deliveries - 1) * EPOCHS_PER_DELIVERY + attempts.num_started + 1
        return max(by_count, attempts.epoch + 1, attempts.epoch_floor + 1)

    @property
    def resources(self) -> ResourceRequest:
        """Resources that a prepared job needs of a worker."""
        if self._resources is None:
            job, num_resumed = self.job, len(self.client.token_ids)
            num_prompt_tokens = len(job.prompt_token_ids or ())
            if job.pooling is not None:
                self._resources = ResourceRequest(
                    num_prompt_tokens, 0, job.tier, job.adapter_version
                )
            else:
                num_new_tokens = max((job.sampling.max_tokens or 1) - num_resumed, 0)
                self._resources = ResourceRequest(
                    num_prompt_tokens + num_resumed, num_new_tokens, job.tier, job.adapter_version
                )
        return self._resources

    # --- what happens to it ---

    def enter(self, phase: JobPhase) -> None:
        """Change the phase. Raises AssertionError if the transition is not allowed."""
        assert phase in _NEXT_PHASES[self.phase], f"{self.phase.name} is followed by {phase.name}"
        self.phase = phase

    def set_prepared(self, job: Job) -> None:
        """Set the job as a worker gets it, with its prompt as token ids."""
        self.job = job
        self._resources = None

    def resume_after(self, token_ids: tuple[int, ...]) -> None:
        """Set the tokens that the client has. The next attempt continues them."""
        self.client.token_ids = token_ids
        self._resources = None

    def renew_lease(self, leased: LeasedJob, now_s: float) -> None:
        """Take the lease of a redelivery to this scheduler."""
        self.lease.token = leased.lease
        self.lease.num_deliveries = leased.num_deliveries
        self.ran_before = True
        self.timing.extended_s = now_s

    def start_waiting_here(self) -> None:
        """Count the job as pulled and not sent."""
        if not self.waits_here:
            self.waits_here = True
            self.queue_counts.num_here += 1

    def stop_waiting_here(self) -> None:
        """Count the job as sent or over."""
        if self.waits_here:
            self.waits_here = False
            self.queue_counts.num_here -= 1

    def start_attempt(self, now_s: float) -> None:
        """Begin an attempt with a dispatch. The job may run at the worker from now on."""
        self.attempts.epoch = self.next_epoch
        self.attempts.num_started += 1
        self.timing.checked_s = now_s

    def undo_attempt(self, epoch_before: int) -> None:
        """Undo an attempt that the worker refused. Nothing ran, so its epoch is free again."""
        self.attempts.epoch = epoch_before
        self.attempts.num_started -= 1

    @property
    def can_be_pulled(self) -> bool:
        """True if cached blocks spare computing the context.

        False if all of it must be computed.
        """
        return self.job.pooling is None and self.job.sampling.prompt_logprobs is None

    @property
    def known_kv_source(self) -> KvSource | None:
        """KV source of the next dispatch, with its number of tokens.

        The worker that last ran the job has all of them.
        """
        source = self.kv_source
        if source is None or source.worker_id != self.left_worker_id:
            return source
        return replace(source, num_tokens=self.resources.num_context_tokens)

    def assign(
        self, worker_id: str, num_cached_tokens: int, kv_source: KvSource | None = None
    ) -> None:
        """Assign the job to a worker, with its expected cached tokens and a KV source for the
        rest."""
        self.worker_id = worker_id
        self.kv_source = kv_source
        if self.trace is not None:
            self.trace.finish_run("lease_lapsed")
            self.trace.start_run(worker_id, num_cached_tokens)

    def unassign(self, error: str) -> None:
        """Remove the job from its worker; ``error`` is the reason unless one was recorded
        before."""
        self.worker_id = ""
        if self.trace is not None:
            self.trace.finish_run(error)

    def count_lost_attempt(self) -> None:
        """Count an attempt that was lost with its worker."""
        self.attempts.num_lost += 1
        if self.trace is not None:
            self.trace.worker_lost(began=self.phase is JobPhase.RUNNING)

    def interrupt(self, error: str, left_worker_id: str = "") -> None:
        """Interrupt the attempt, so another worker continues it.

        ``error`` is the reason. ``left_worker_id`` names the worker if it keeps the job's blocks.
        """
        self.ran_before = self.interrupted = True
        self.left_worker_id = left_worker_id
        if self.trace is not None:
            self.trace.finish_run(error)

    def stop_tracing(self) -> None:
        """Stop tracing here. Another scheduler continues the job and its trace."""
        if self.trace is not None:
            self.trace.stop()
            self.trace = None


class JobTable:
    """Scheduled jobs by request id, until they end. ``has_jobs`` is set while there is one."""

    def __init__(self) -> None:
        self._jobs: dict[str, ScheduledJob] = {}
        self.has_jobs = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[ScheduledJob]:
        """Iterate over a snapshot. Jobs may come and go meanwhile."""
        return iter(list(self._jobs.values()))

    def get(self, request_id: str) -> ScheduledJob | None:
        return self._jobs.get(request_id)

    def add(self, scheduled: ScheduledJob) -> None:
        """Add a pulled job that this scheduler answers for."""
        assert scheduled.request_id not in self._jobs, "the job is in the table already"
        self._jobs[scheduled.request_id] = scheduled
        self.has_jobs.set()
        scheduled.queue_counts.num_ours += 1
        scheduled.start_waiting_here()

    def remove(self, scheduled: ScheduledJob, error: str = "") -> None:
        """Remove a job that is over here. ``error`` is its failure, empty for none.

        Calls still in flight for the job find it ended.
        """
        scheduled.enter(JobPhase.ENDED)
        scheduled.stop_waiting_here()
        scheduled.queue_counts.num_ours -= 1
        if scheduled.trace is not None:
            scheduled.trace.finish(error)
        if self._jobs.get(scheduled.request_id) is scheduled:
            del self._jobs[scheduled.request_id]
            if not self._jobs:
                self.has_jobs.clear()
