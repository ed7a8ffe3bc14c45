"""Work queue in memory: redelivery, duplicates and bounds as in JetStream."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from millrace.bus.job_queue import QueueDepth
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.config import NatsConfig

DUPLICATE_WINDOW_S = 600.0


@dataclass(eq=False)
class StoredJob:
    """Message of the queue.

    It is leased until ``due_s`` on the monotonic clock, and then delivered again. Its alarm rings
    at ``alarm_s``, or has rung.
    """

    sequence: int
    subject: str
    payload: bytes
    content_type: str | None
    stored_ns: int
    num_deliveries: int = 0
    due_s: float = 0.0
    alarm_s: float = 0.0

    @property
    def lease(self) -> str:
        return f"$ACK.{self.num_deliveries}.{self.sequence}"


@dataclass(eq=False)
class _Consumer:
    """Server's state of a tenant queue after its first pull."""

    held: dict[int, StoredJob] = field(default_factory=dict)
    alarms: list[tuple[float, int]] = field(default_factory=list)

    def hold(self, job: StoredJob, due_s: float) -> None:
        """Lease a job until ``due_s``.

        A job has one valid alarm, which may ring too early: leases are extended far more often than
        they end.
        """
        job.due_s = due_s
        if job.sequence not in self.held or due_s < job.alarm_s:
            self._set_alarm(job)
        self.held[job.sequence] = job

    def take_due(self, now_s: float, max_jobs: int) -> list[StoredJob]:
        """Return jobs whose lease has lapsed. The caller leases them again."""
        taken: list[StoredJob] = []
        while len(taken) < max_jobs and self.alarms and self.alarms[0][0] <= now_s:
            alarm_s, sequence = heapq.heappop(self.alarms)
            job = self.held.get(sequence)
            if job is None or job.alarm_s != alarm_s:
                continue
            if job.due_s > now_s:
                self._set_alarm(job)
            else:
                del self.held[sequence]
                taken.append(job)
        return taken

    def _set_alarm(self, job: StoredJob) -> None:
        job.alarm_s = job.due_s
        heapq.heappush(self.alarms, (job.due_s, job.sequence))


class _Queue:
    """Jobs of one subject.

    ``waiting`` jobs were never delivered, except to a forgotten consumer.
    """

    def __init__(self) -> None:
        self.waiting: deque[StoredJob] = deque()
        self.consumer: _Consumer | None = None
        self.waiters: set[asyncio.Event] = set()

    @property
    def num_held(self) -> int:
        return len(self.consumer.held) if self.consumer is not None else 0

    def wake(self) -> None:
        for event in self.waiters:
            event.set()


class StoredJobs:
    """All tenant queues by subject, and the pulls that wait for them."""

    def __init__(self, clock: Clock, config: NatsConfig) -> None:
        self._clock = clock
        self._config = config
        self._tenant_queues: dict[str, _Queue] = {}
        self._jobs: dict[int, StoredJob] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._sequences = itertools.count(1)
        self.last_sequence = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._config.max_stored_jobs

    def add(
        self, subject: str, payload: bytes, content_type: str | None, message_id: str
    ) -> tuple[int, bool]:
        """Add a message; return its sequence, and whether its message id was known.

        The caller has checked the bound.
        """
        now_s = self._clock.monotonic()
        known = self._seen.get(message_id)
        if message_id and known is not None and known[1] > now_s:
            return known[0], True
        job = StoredJob(
            sequence=next(self._sequences),
            subject=subject,
            payload=payload,
            content_type=content_type,
            stored_ns=self._clock.now_ns(),
        )
        self.last_sequence = job.sequence
        self._jobs[job.sequence] = job
        tenant_queue = self._tenant_queue(subject)
        tenant_queue.waiting.append(job)
        if message_id:
            self._seen[message_id] = (job.sequence, now_s + DUPLICATE_WINDOW_S)
        tenant_queue.wake()
        return job.sequence, False

    def is_duplicate(self, message_id: str) -> bool:
        known = self._seen.get(message_id)
        return known is not None and known[1] > self._clock.monotonic()

    def take(self, subject: str, max_jobs: int) -> list[StoredJob]:
        """Return jobs to deliver now, redeliveries first. Each is leased for AckWait."""
        tenant_queue = self._tenant_queue(subject)
        if tenant_queue.consumer is None:
            tenant_queue.consumer = _Consumer()
        now_s = self._clock.monotonic()
        taken = tenant_queue.consumer.take_due(now_s, max_jobs)
        while tenant_queue.waiting and len(taken) < max_jobs:
            taken.append(tenant_queue.waiting.popleft())
        for job in taken:
            job.num_deliveries += 1
            tenant_queue.consumer.hold(job, now_s + self._config.ack_wait_s)
        return taken

    def next_due_s(self, subject: str) -> float | None:
        """Return the time of the next redelivery on the monotonic clock; None without leases."""
        consumer = self._tenant_queue(subject).consumer
        return consumer.alarms[0][0] if consumer is not None and consumer.alarms else None

    def hold(self, lease: str, seconds: float) -> None:
        """Deliver a leased job again after ``seconds``, unless it is gone."""
        sequence = sequence_of(lease)
        job = self._jobs.get(sequence)
        if job is None:
            return
        tenant_queue = self._tenant_queue(job.subject)
        if tenant_queue.consumer is not None and sequence in tenant_queue.consumer.held:
            tenant_queue.consumer.hold(job, self._clock.monotonic() + seconds)
            if seconds < self._config.ack_wait_s:
                tenant_queue.wake()

    def remove(self, sequence: int) -> None:
        """Remove a job, also if its deliveries were forgotten."""
        job = self._jobs.pop(sequence, None)
        if job is None:
            return
        tenant_queue = self._tenant_queue(job.subject)
        if (
            tenant_queue.consumer is None
            or tenant_queue.consumer.held.pop(job.sequence, None) is None
        ):
            tenant_queue.waiting.remove(job)

    def take_newest(self, subject: str) -> StoredJob | None:
        """Remove and return the newest job that was never delivered."""
        tenant_queue = self._tenant_queue(subject)
        if not tenant_queue.waiting:
            return None
        job = tenant_queue.waiting.pop()
        del self._jobs[job.sequence]
        return job

    def depth(self, subject: str) -> QueueDepth:
        tenant_queue = self._tenant_queues.get(subject) or _Queue()
        return QueueDepth(num_queued=len(tenant_queue.waiting), num_leased=tenant_queue.num_held)

    def find(self, sequence: int) -> StoredJob | None:
        return self._jobs.get(sequence)

    def holds(self, sequence: int) -> bool:
        return sequence in self._jobs

    def subjects(self) -> dict[str, int]:
        """Return the number of jobs by subject, without zeros."""
        counts = {
            subject: len(tenant_queue.waiting) + tenant_queue.num_held
            for subject, tenant_queue in self._tenant_queues.items()
        }
        return {subject: count for subject, count in counts.items() if count}

    def forget(self, subject: str) -> bool:
        """Forget a tenant queue without jobs; return False if it has any."""
        tenant_queue = self._tenant_queues.get(subject)
        if tenant_queue is None:
            return True
        if tenant_queue.waiting or tenant_queue.num_held:
            return False
        tenant_queue.consumer = None
        if not tenant_queue.waiters:
            del self._tenant_queues[subject]
        return True

    def lose_deliveries(self) -> None:
        """Forget all deliveries, as a server does that is killed before it stores them.

        The jobs stay.
        """
        for tenant_queue in self._tenant_queues.values():
            held = tenant_queue.consumer.held.values() if tenant_queue.consumer is not None else ()
            for job in held:
                job.num_deliveries = 0
            tenant_queue.waiting = deque(
                sorted([*held, *tenant_queue.waiting], key=lambda job: job.sequence)
            )
            tenant_queue.consumer = None
            tenant_queue.wake()

    async def wait(self, subject: str, timeout_s: float) -> None:
        """Wait for a change of a tenant queue, at most ``timeout_s``."""
        event = asyncio.Event()
        waiters = self._tenant_queue(subject).waiters
        waiters.add(event)
        try:
            await wait_or_sleep(event, self._clock, timeout_s)
        finally:
            waiters.discard(event)

    def wake(self) -> None:
        for tenant_queue in self._tenant_queues.values():
            tenant_queue.wake()

    def _tenant_queue(self, subject: str) -> _Queue:
        return self._tenant_queues.setdefault(subject, _Queue())


def sequence_of(lease: str) -> int:
    """Return the sequence of a leased job."""
    return int(lease.rpartition(".")[2])
