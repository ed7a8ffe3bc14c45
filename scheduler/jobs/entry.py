"""A job that this scheduler answers for, from the pull until it is known to have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from bus.api import LeasedJob, Line
from scheduler.jobs.attempts import Lives
from scheduler.jobs.poison_pills import PoisonSuspicion
from scheduler.jobs.prompt_keys import NO_KEYS, PromptKeys
from scheduler.jobs.resource_request import Need
from scheduler.jobs.tenant_queues import TenantQueueCounts
from scheduler.jobs.tracing import JobTrace
from schemas.control import EPOCHS_PER_DELIVERY, Reservation
from schemas.jobs import Job


class State(Enum):
    """Who holds the lease: we do, until a worker runs it."""

    PREPARING = auto()
    WAITING = auto()
    DISPATCHING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """One job and what became of it here.

    ``epoch`` is that of the last run that began or may have begun, 0 before the first;
    ``num_failures`` counts the runs that were lost, which ``max_attempts`` bounds.
    ``epoch_floor`` is the highest that somebody else is known to have run at, ``claimed_epoch``
    the last below which we told everybody to stop. ``ran_before``: a
    client may have tokens of an earlier run, so ask before running it again; ``interrupted``: there
    was one, as far as anybody knows; ``uncertain``: nobody knows whether it ran. ``pulled_s`` is
    when it came here, ``waits_here`` whether it is among those that wait.
    ``expected_output_tokens`` is an estimate, ``expected_tokens`` the service that it is expected
    to take; ``charged_tokens`` is what its tenant was charged for the run that goes on.
    ``told_position`` is the last that its client was told. ``num_delivered`` are the tokens
    that the client had when the last run began; ``lives`` are its runs so far. ``reservation`` is
    what was set aside for a job that no gateway let in, ``is_reserved_here`` whether that is within
    this process.
    """

    job: Job
    lease: str
    num_deliveries: int
    stream_sequence: int
    line: Line
    queue_counts: TenantQueueCounts
    pulled_s: float
    state: State = State.PREPARING
    num_attempts: int = 0
    num_failures: int = 0
    epoch: int = 0
    epoch_floor: int = 0
    claimed_epoch: int = 0
    ran_before: bool = False
    interrupted: bool = False
    worker_id: str = ""
    resume_token_ids: tuple[int, ...] = ()
    extended_s: float = 0.0
    checked_s: float = 0.0
    uncertain: bool = False
    waits_here: bool = False
    expected_output_tokens: float = 1.0
    expected_tokens: float = 1.0
    charged_tokens: float = 0.0
    told_position: int | None = None
    prefix_keys: PromptKeys = NO_KEYS
    suspicion: PoisonSuspicion = field(default_factory=PoisonSuspicion)
    num_delivered: int = 0
    lives: Lives = field(default_factory=Lives)
    stored_ns: int = 0
    trace: JobTrace | None = None
    reservation: Reservation | None = None
    is_reserved_here: bool = False

    @classmethod
    def of(cls, leased: LeasedJob, queue_counts: TenantQueueCounts, now_s: float) -> Entry:
        return cls(
            job=leased.job,
            lease=leased.lease,
            num_deliveries=leased.num_deliveries,
            stream_sequence=leased.stream_sequence,
            line=leased.line,
            queue_counts=queue_counts,
            pulled_s=now_s,
            ran_before=leased.num_deliveries > 1,
            uncertain=leased.uncertain,
            extended_s=now_s,
            stored_ns=leased.stored_ns,
        )

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def is_held(self) -> bool:
        """The lease is ours to extend."""
        return self.state in (State.PREPARING, State.WAITING, State.DISPATCHING)

    @property
    def is_ended(self) -> bool:
        """It is not ours any more: answered, or somebody else's."""
        return self.state is State.ENDED

    @property
    def next_epoch(self) -> int:
        """The epoch of the next run: above every one before."""
        by_count = (self.num_deliveries - 1) * EPOCHS_PER_DELIVERY + self.num_attempts + 1
        return max(by_count, self.epoch + 1, self.epoch_floor + 1)

    @property
    def need(self) -> Need:
        """What a prepared job takes of a worker."""
        num_prompt_tokens = len(self.job.prompt_token_ids or ())
        if self.job.pooling is not None:
            return Need(num_prompt_tokens, 0, self.job.tier)
        num_resumed = len(self.resume_token_ids)
        max_tokens = self.job.sampling.max_tokens or 1
        num_new_tokens = max(max_tokens - num_resumed, 0)
        return Need(num_prompt_tokens + num_resumed, num_new_tokens, self.job.tier)

    def wait_here(self) -> None:
        """It was pulled, or taken back from a worker."""
        if not self.waits_here:
            self.waits_here = True
            self.queue_counts.num_here += 1

    def wait_no_more(self) -> None:
        """It was sent, or is over."""
        if self.waits_here:
            self.waits_here = False
            self.queue_counts.num_here -= 1

    def begin_run(self, now_s: float) -> None:
        """A dispatch goes out: from here on it may run at the worker."""
        self.epoch = self.next_epoch
        self.num_attempts += 1
        self.checked_s = now_s

    def place(self, worker_id: str, num_cached_tokens: int) -> None:
        """It goes to a worker, in whose cache so much of its prompt is thought to be."""
        self.worker_id = worker_id
        if self.trace is not None:
            self.trace.run_over("lease_lapsed")
            self.trace.placed(worker_id, num_cached_tokens)

    def take_back(self, error: str) -> None:
        """It is with no worker; ``error``: why, if nobody said so before."""
        self.worker_id = ""
        if self.trace is not None:
            self.trace.run_over(error)

    def count_failure(self) -> None:
        """A run was lost with its worker."""
        self.num_failures += 1
        if self.trace is not None:
            self.trace.worker_lost(began=self.state is State.RUNNING)

    def interrupt(self, error: str) -> None:
        """Others are to go on with it; ``error``: why."""
        self.ran_before = self.interrupted = True
        if self.trace is not None:
            self.trace.run_over(error)

    def leave(self) -> None:
        """This scheduler ends, and others go on with it."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    def undo_run(self, epoch_before: int) -> None:
        """The worker refused the dispatch: nothing ran at that epoch, it is free again."""
        self.epoch = epoch_before
        self.num_attempts -= 1

    def take_over(self, leased: LeasedJob, now_s: float) -> None:
        """The queue delivered it again, to us."""
        self.lease = leased.lease
        self.num_deliveries = leased.num_deliveries
        self.ran_before = True
        self.extended_s = now_s


class Table:
    """Every entry by its request id. Entries leave it when they ended."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """A snapshot: entries may come and go meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def add(self, entry: Entry) -> None:
        assert entry.request_id not in self._entries, "an entry is there already"
        self._entries[entry.request_id] = entry

    def drop(self, entry: Entry, error: str = "") -> None:
        """The entry is over here, for ``error`` if it failed; what is still in flight for it finds
        it ended."""
        entry.state = State.ENDED
        if entry.trace is not None:
            entry.trace.over(error)
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]
