"""The work queue in memory: redelivery, duplicates and bounds as JetStream has them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass

from bus import subjects
from bus.api import QueueDepth
from bus.clock import Clock
from schemas.config import NatsConfig

DUPLICATE_WINDOW_S = 600.0


@dataclass(eq=False)
class StoredJob:
    """A message of the queue. ``due_s`` is when it may be delivered (again), on the monotonic
    clock; it is held by somebody until then."""

    sequence: int
    subject: str
    payload: bytes
    content_type: str | None
    stored_ns: int
    num_deliveries: int = 0
    due_s: float = 0.0

    @property
    def lease(self) -> str:
        return f"$ACK.{self.subject.split('.')[1]}.{self.num_deliveries}.{self.sequence}"


class _ModelQueue:
    """Jobs of one model: ``waiting`` were never delivered, ``held`` were and are not acked."""

    def __init__(self) -> None:
        self.waiting: deque[StoredJob] = deque()
        self.held: dict[int, StoredJob] = {}


class StoredJobs:
    """All queues, and the pulls that wait for them."""

    def __init__(self, clock: Clock, config: NatsConfig) -> None:
        self._clock = clock
        self._config = config
        self._queues: dict[str, _ModelQueue] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._sequences = itertools.count(1)
        self._waiters: set[asyncio.Event] = set()

    def __len__(self) -> int:
        return sum(len(queue.waiting) + len(queue.held) for queue in self._queues.values())

    @property
    def is_full(self) -> bool:
        return len(self) >= self._config.max_stored_jobs

    def add(
        self, subject: str, payload: bytes, content_type: str | None, message_id: str
    ) -> tuple[int, bool]:
        """(sequence, whether that message id was there already); the caller checked the bound."""
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
        self._queue(subject.split(".")[1]).waiting.append(job)
        if message_id:
            self._seen[message_id] = (job.sequence, now_s + DUPLICATE_WINDOW_S)
        self.wake()
        return job.sequence, False

    def is_duplicate(self, message_id: str) -> bool:
        known = self._seen.get(message_id)
        return known is not None and known[1] > self._clock.monotonic()

    def take(self, model: str, max_jobs: int) -> list[StoredJob]:
        """Jobs to deliver now, those delivered before first; each is held for AckWait."""
        queue = self._queue(subjects.token(model))
        now_s = self._clock.monotonic()
        taken = [job for job in queue.held.values() if job.due_s <= now_s][:max_jobs]
        while queue.waiting and len(taken) < max_jobs:
            job = queue.waiting.popleft()
            queue.held[job.sequence] = job
            taken.append(job)
        for job in taken:
            job.num_deliveries += 1
            job.due_s = now_s + self._config.ack_wait_s
        return taken

    def next_due_s(self, model: str) -> float | None:
        """When the first held job comes back, on the monotonic clock."""
        held = self._queue(subjects.token(model)).held.values()
        return min((job.due_s for job in held), default=None)

    def hold(self, lease: str, seconds: float) -> None:
        """Deliver it again after ``seconds``, unless it is gone already."""
        queue, sequence = self._locate(lease)
        job = queue.held.get(sequence)
        if job is not None:
            job.due_s = self._clock.monotonic() + seconds
            self.wake()

    def remove(self, lease: str) -> None:
        queue, sequence = self._locate(lease)
        queue.held.pop(sequence, None)

    def take_newest(self, model: str) -> StoredJob | None:
        """Take the newest job that was never delivered out of the queue."""
        queue = self._queue(subjects.token(model))
        return queue.waiting.pop() if queue.waiting else None

    def depth(self, model: str) -> QueueDepth:
        queue = self._queue(subjects.token(model))
        return QueueDepth(num_queued=len(queue.waiting), num_leased=len(queue.held))

    def holds(self, sequence: int) -> bool:
        return any(
            sequence in queue.held or any(job.sequence == sequence for job in queue.waiting)
            for queue in self._queues.values()
        )

    def models(self) -> list[str]:
        """The models of which there are jobs."""
        return sorted(
            subjects.untoken(model_token)
            for model_token, queue in self._queues.items()
            if queue.waiting or queue.held
        )

    async def wait(self, timeout_s: float) -> None:
        """Return after a change, or after ``timeout_s``."""
        event = asyncio.Event()
        self._waiters.add(event)
        await wait_or_sleep(event, self._clock, timeout_s)
        self._waiters.discard(event)

    def wake(self) -> None:
        for event in self._waiters:
            event.set()

    def _queue(self, model_token: str) -> _ModelQueue:
        return self._queues.setdefault(model_token, _ModelQueue())

    def _locate(self, lease: str) -> tuple[_ModelQueue, int]:
        _, model_token, _, sequence = lease.split(".")
        return self._queue(model_token), int(sequence)


async def wait_or_sleep(event: asyncio.Event, clock: Clock, timeout_s: float) -> None:
    """Until the event is set, or ``timeout_s`` have passed on the clock."""
    tasks = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(timeout_s))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
