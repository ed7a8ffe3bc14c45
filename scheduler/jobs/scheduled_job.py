"""A job that this scheduler answers for, from the pull until it is known to have ended."""

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

# Beyond this many, the two oldest are kept as one.
MAX_ATTEMPTS_KEPT = 16


class _KnownAttempt(NamedTuple):
    """``is_accepted``: its worker said so; ``is_reported``: it said what the attempt took, too."""

    attempt: Attempt
    is_accepted: bool = False
    is_reported: bool = False


@dataclass(slots=True)
class AttemptHistory:
    """What is known of a job's attempts.

    ``epoch`` is that of the last one that began or may have begun, 0 before the first;
    ``epoch_floor`` the highest that somebody else is known to have run at, ``claimed_epoch`` the
    last below which we told everybody to stop. ``num_started`` were sent by this scheduler,
    ``num_lost`` with their workers, which ``max_attempts`` bounds.

    A worker reports an attempt when it is over there; what it took on a worker that was killed
    nobody knows.
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
        """That we ran it at, or told others to stop below."""
        return max(self.epoch, self.claimed_epoch)

    def add_sent(self, worker_id: str, sent_ns: int, *, is_accepted: bool) -> None:
        """A dispatch of ``epoch`` went to a worker, which accepted it or did not answer: it began
        then at the earliest."""
        if self.epoch not in self._by_epoch:
            attempt = Attempt(epoch=self.epoch, worker_id=worker_id, started_ns=sent_ns)
            self._add(_KnownAttempt(attempt, is_accepted))

    def add_found(self, epoch: int, worker_id: str) -> None:
        """The index knows of an attempt that another scheduler sent."""
        if epoch not in self._by_epoch and worker_id:
            self._add(_KnownAttempt(Attempt(epoch=epoch, worker_id=worker_id)))

    def add_report(self, served: Served, worker_id: str, now_ns: int) -> None:
        """A worker says what an attempt took that is over there. Earlier ones there that it says
        nothing of were the same, under other epochs."""
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
        """None of them goes on."""
        for epoch, one in self._by_epoch.items():
            if not one.attempt.ended_ns:
                self._by_epoch[epoch] = one._replace(attempt=replace(one.attempt, ended_ns=now_ns))

    def earlier(self, worker_id: str = "") -> tuple[Attempt, ...]:
        """All of them, by epoch; for a worker without those that it may still continue."""
        known = sorted(self._by_epoch.items())
        return tuple(
            one.attempt for _, one in known if one.is_reported or one.attempt.worker_id != worker_id
        )

    @property
    def unreported_worker_id(self) -> str:
        """The worker that accepted the last attempt, if it has not reported it so far; else
        empty."""
        if not self._by_epoch:
            return ""
        last = self._by_epoch[max(self._by_epoch)]
        return last.attempt.worker_id if last.is_accepted and not last.is_reported else ""

    async def wait_for_report(self, timeout_s: float) -> None:
        """Wait until the last attempt is reported, if it may be; ``timeout_s`` at most."""
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
    """Of one job: ``failures`` are the deaths of workers that it is suspected of, ``detector`` the
    one that looks into the last of them. ``outlived_engine``: an engine died under it, and nobody
    knows of a token that it has made since."""

    failures: float = 0.0
    detector: PoisonPillDetector | None = None
    outlived_engine: bool = False


class PoisonPillDetector:
    """Looks into the death of one worker: how far each request got that it held.

    A request whose client got nothing new from that run is a suspect. The only suspect has a
    failure, each of several has half a failure; a request with two failures is a poison pill.
    Whoever got further is cleared of all, so that requests which merely live through the deaths of
    workers are not blamed.
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
        """Whether the client of one had new tokens of the run that died. One that is over, or of
        which nobody knows, counts as having progressed."""
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


# Blocks are asked for the tokens there are and this many to come, not for all that may come: most
# completions end long before max_tokens, and a worker that runs out preempts.
HEADROOM_TOKENS = 64

# The most urgent tier has rank 0. Those of a higher rank make way.
TIER_RANKS = {tier: rank for rank, tier in enumerate(Tier)}


class ResourceRequest(NamedTuple):
    """``num_context_tokens`` are to be prefilled (prompt and delivered tokens), at most
    ``num_new_tokens`` follow; none if it is an embedding that is asked for. Work of lower tiers
    than ``tier`` makes way for it. ``adapter`` is the version of the adapter that it has, empty for
    none."""

    num_context_tokens: int
    num_new_tokens: int
    tier: Tier = Tier.FREE
    adapter: str = ""

    @property
    def total_tokens(self) -> int:
        return self.num_context_tokens + self.num_new_tokens

    def num_blocks(self, block_size_tokens: int) -> int:
        """KV blocks that it will soon hold."""
        tokens = self.num_context_tokens + min(self.num_new_tokens, HEADROOM_TOKENS)
        return -(-tokens // block_size_tokens)


@dataclass(slots=True)
class TenantQueueCounts:
    """What this scheduler knows of a tenant queue of one model.

    ``num_waiting`` jobs are thought to be in the queue for whoever pulls, of which
    ``num_announced`` were announced since the last pull, less than none if a pull that waited was
    faster than the announcement (``num_announced_before``: at the beginning of the pull under way).
    ``num_here`` were pulled and not sent, ``num_ours`` pulled and not ended; ``num_others`` were
    not found by the last pull, so other schedulers and their workers have them. ``total`` is what
    was counted last, ``is_due``: a lease may have lapsed, so a pull is worth a try.
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
    """Where a job is. This scheduler extends the lease, until a worker runs the job."""

    PREPARING = auto()  # pulled; its prompt is tokenized, its admission checked
    HELD = auto()  # its tenant's limits have no place for it now
    WAITING = auto()  # in the fair queue
    DISPATCHING = auto()  # on its way to a worker
    RUNNING = auto()  # a worker has it, and extends the lease
    ENDED = auto()  # answered, or somebody else's


_NEXT_PHASES = {
    JobPhase.PREPARING: (JobPhase.HELD, JobPhase.WAITING, JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.HELD: (JobPhase.WAITING, JobPhase.ENDED),
    JobPhase.WAITING: (JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.DISPATCHING: (JobPhase.RUNNING, JobPhase.WAITING, JobPhase.ENDED),
    JobPhase.RUNNING: (JobPhase.WAITING, JobPhase.DISPATCHING, JobPhase.ENDED),
    JobPhase.ENDED: (),
}


class Tenant(NamedTuple):
    """A tenant in one tier: whom service is shared among."""

    tier: Tier
    name: str

    @classmethod
    def of(cls, tenant_queue: TenantQueue) -> Tenant:
        """Whose the jobs of a tenant queue are; the name is empty where the subject has none."""
        return cls(tenant_queue.tier, tenant_queue.tenant or "")


@dataclass(slots=True)
class Lease:
    """What the queue said with the job. ``token`` extends, releases or acknowledges the lease;
    ``is_uncertain``: nobody knows whether the job ran before this delivery."""

    token: str
    num_deliveries: int
    stream_sequence: int
    tenant_queue: TenantQueue
    is_uncertain: bool = False


@dataclass(slots=True)
class JobTiming:
    """When the queue stored the job (UTC epoch), and on the monotonic clock when it was pulled, its
    lease extended, and its end looked up in the queue."""

    stored_ns: int = 0
    pulled_s: float = 0.0
    extended_s: float = 0.0
    checked_s: float = 0.0


@dataclass(slots=True)
class ClientView:
    """What the client of a job has got: ``token_ids``, which the next attempt continues;
    ``num_tokens_at_start`` of them when the last attempt started; and the position in the queue
    that it was last told."""

    token_ids: tuple[int, ...] = ()
    num_tokens_at_start: int = 0
    announced_position: int | None = None


@dataclass(slots=True)
class ExpectedService:
    """What a prepared job is expected to take: ``output_tokens`` of completion, ``tokens`` worth of
    service in all. ``charged_tokens`` is what its tenant was charged for the attempt under way."""

    output_tokens: float = 1.0
    tokens: float = 1.0
    charged_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class ScheduledJob:
    """One job and what became of it here.

    ``ran_before``: a client may have tokens of an earlier attempt, so ask before running it again;
    ``interrupted``: there was one, as far as anybody knows. ``waits_here``: ``queue_counts`` has it
    among those that were pulled and not sent. ``reservation`` is what was set aside for a job that
    no gateway admitted, ``is_reserved_here`` whether that is within this process. ``adapter`` is
    the one that a prepared job names, as workers load it. ``left_worker_id`` is the worker that it
    was moved from, whose KV cache has all of it (empty: none); ``kv_source`` is where the worker
    that it goes to, or is at, can pull its context from.
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
        """The lease is ours to extend."""
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
        """The epoch of the next attempt: above every one before."""
        attempts = self.attempts
        by_count = (self.lease.num_deliveries - 1) * EPOCHS_PER_DELIVERY + attempts.num_started + 1
        return max(by_count, attempts.epoch + 1, attempts.epoch_floor + 1)

    @property
    def resources(self) -> ResourceRequest:
        """What a prepared job takes of a worker."""
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
        """Every change of phase. AssertionError: there is no way from the phase before."""
        assert phase in _NEXT_PHASES[self.phase], f"{self.phase.name} is followed by {phase.name}"
        self.phase = phase

    def set_prepared(self, job: Job) -> None:
        """The job as a worker gets it, its prompt in token ids."""
        self.job = job
        self._resources = None

    def resume_after(self, token_ids: tuple[int, ...]) -> None:
        """The client has these tokens; the next attempt continues them."""
        self.client.token_ids = token_ids
        self._resources = None

    def renew_lease(self, leased: LeasedJob, now_s: float) -> None:
        """The queue delivered it again, to us."""
        self.lease.token = leased.lease
        self.lease.num_deliveries = leased.num_deliveries
        self.ran_before = True
        self.timing.extended_s = now_s

    def start_waiting_here(self) -> None:
        """It was pulled, or taken back from a worker."""
        if not self.waits_here:
            self.waits_here = True
            self.queue_counts.num_here += 1

    def stop_waiting_here(self) -> None:
        """It was sent, or is over."""
        if self.waits_here:
            self.waits_here = False
            self.queue_counts.num_here -= 1

    def start_attempt(self, now_s: float) -> None:
        """A dispatch goes out: from here on the job may run at the worker."""
        self.attempts.epoch = self.next_epoch
        self.attempts.num_started += 1
        self.timing.checked_s = now_s

    def undo_attempt(self, epoch_before: int) -> None:
        """The worker refused the dispatch: nothing ran at that epoch, it is free again."""
        self.attempts.epoch = epoch_before
        self.attempts.num_started -= 1

    @property
    def can_be_pulled(self) -> bool:
        """Whether blocks of its context spare computing them: all of it is asked for otherwise."""
        return self.job.pooling is None and self.job.sampling.prompt_logprobs is None

    @property
    def known_kv_source(self) -> KvSource | None:
        """Where the next dispatch's tokens can be pulled from, now that it is known how many there
        are: whoever ran it last has all of them."""
        source = self.kv_source
        if source is None or source.worker_id != self.left_worker_id:
            return source
        return replace(source, num_tokens=self.resources.num_context_tokens)

    def assign(
        self, worker_id: str, num_cached_tokens: int, kv_source: KvSource | None = None
    ) -> None:
        """It goes to a worker, in whose cache so much of its prompt is thought to be, and which can
        pull more from a source."""
        self.worker_id = worker_id
        self.kv_source = kv_source
        if self.trace is not None:
            self.trace.finish_run("lease_lapsed")
            self.trace.start_run(worker_id, num_cached_tokens)

    def unassign(self, error: str) -> None:
        """It is with no worker; ``error``: why, if nobody said so before."""
        self.worker_id = ""
        if self.trace is not None:
            self.trace.finish_run(error)

    def count_lost_attempt(self) -> None:
        """The worker is gone, and the attempt with it."""
        self.attempts.num_lost += 1
        if self.trace is not None:
            self.trace.worker_lost(began=self.phase is JobPhase.RUNNING)

    def interrupt(self, error: str, left_worker_id: str = "") -> None:
        """Another worker is to continue it; ``error``: why. The one that it leaves keeps its blocks
        if it is named."""
        self.ran_before = self.interrupted = True
        self.left_worker_id = left_worker_id
        if self.trace is not None:
            self.trace.finish_run(error)

    def stop_tracing(self) -> None:
        """This scheduler stops, and another one goes on with the job and its trace."""
        if self.trace is not None:
            self.trace.stop()
            self.trace = None


class JobTable:
    """Every scheduled job by its request id, until it has ended. ``has_jobs`` is set while there is
    one."""

    def __init__(self) -> None:
        self._jobs: dict[str, ScheduledJob] = {}
        self.has_jobs = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[ScheduledJob]:
        """A snapshot: jobs may come and go meanwhile."""
        return iter(list(self._jobs.values()))

    def get(self, request_id: str) -> ScheduledJob | None:
        return self._jobs.get(request_id)

    def add(self, scheduled: ScheduledJob) -> None:
        """It was pulled, and is this scheduler's to answer for."""
        assert scheduled.request_id not in self._jobs, "the job is in the table already"
        self._jobs[scheduled.request_id] = scheduled
        self.has_jobs.set()
        scheduled.queue_counts.num_ours += 1
        scheduled.start_waiting_here()

    def remove(self, scheduled: ScheduledJob, error: str = "") -> None:
        """The job is over here, for ``error`` if it failed; what is still in flight for it finds it
        ended."""
        scheduled.enter(JobPhase.ENDED)
        scheduled.stop_waiting_here()
        scheduled.queue_counts.num_ours -= 1
        if scheduled.trace is not None:
            scheduled.trace.finish(error)
        if self._jobs.get(scheduled.request_id) is scheduled:
            del self._jobs[scheduled.request_id]
            if not self._jobs:
                self.has_jobs.clear()
