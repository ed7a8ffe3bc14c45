"""Leases of the requests that run here: extended in time, confirmed after a gap, written to the
shared index.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from millrace.bus.api import Bus
from millrace.bus.job_queue import JobQueue
from millrace.bus.running_requests import RunningRequest
from millrace.runtime.clock import Clock
from millrace.schemas.errors import MillraceError
from millrace.workers.host.generations.generation import Generation

_MAX_PENDING = 10_000


class Generations(Protocol):
    """Index of running requests as a worker uses it, implemented by ``bus.running_requests``.

    Calls never raise. While the index is unreachable nothing is known, and heartbeats and leases
    decide.
    """

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None: ...

    async def drop(self, request_id: str, worker_id: str) -> None: ...

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None: ...

    async def lookup(self, request_id: str) -> RunningRequest | None: ...


class IndexWriter:
    """Queue of index writes; while the index is slow, the oldest are dropped."""

    def __init__(self, generations: Generations, worker_id: str) -> None:
        self._generations = generations
        self._worker_id = worker_id
        self._pending: deque[Callable[[], Awaitable[None]]] = deque(maxlen=_MAX_PENDING)
        self._has_pending = asyncio.Event()

    def start(self, request_id: str, epoch: int, lease: str) -> None:
        """Record that this worker runs the request under ``lease``."""
        self._add(lambda: self._generations.start(request_id, self._worker_id, epoch, lease))

    def drop(self, request_id: str) -> None:
        """Record that this worker no longer runs the request and has not answered it."""
        self._add(lambda: self._generations.drop(request_id, self._worker_id))

    def finish(self, request_id: str, epoch: int) -> None:
        """Record that the request is answered."""
        self._add(lambda: self._generations.finish(request_id, self._worker_id, epoch))

    async def run(self) -> None:
        """Write to the index until cancelled."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            writes = list(self._pending)
            self._pending.clear()
            # Writes that are made together travel together.
            await asyncio.gather(*(write() for write in writes))

    def _add(self, write: Callable[[], Awaitable[None]]) -> None:
        self._pending.append(write)
        self._has_pending.set()


# Time after which the index is reliable. Once schedulers receive a worker's heartbeats again, they
# start no takeover for silence; takeovers begun before are in the index after this time.
SETTLE_S = 2.0
_NS_PER_S = 1e9
_NEVER_S = float("-inf")

logger = logging.getLogger(__name__)


class Ownership(Enum):
    """Ownership of a request's lease by this worker. UNKNOWN: possibly lost, and it cannot be
    known.
    """

    HELD = auto()
    LOST = auto()
    UNKNOWN = auto()


class LeaseOwnership:
    """Check that this worker still owns a lease before it finalizes the request.

    A worker that stalled (stopped, swapped out) or was disconnected from the bus may have been
    declared dead. Then another worker runs its requests at higher epochs under the same leases, and
    the queue would take an ack from here for the other's. So after such a gap, a stall of
    ``stall_s`` or a disconnection of any length, requests dispatched before or just after it are
    unconfirmed until ``SETTLE_S`` have passed and the index has no higher epoch. Cancels of
    requests taken over still reach a worker that stalled. A disconnected worker may miss them: if
    the index does not know the request either, its ownership stays unknown.

    Call ``check_for_gap`` more often than every ``stall_s``. After each gap, ``run`` checks all
    generations that ``held`` returns, and calls ``on_lost`` for each that another worker owns.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        generations: Generations,
        stall_s: float,
        held: Callable[[], Iterable[Generation]],
        on_lost: Callable[[Generation], None],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._generations = generations
        self._stall_s = stall_s
        self._held = held
        self._on_lost = on_lost
        self._looked_s = clock.monotonic()
        self._looked_ns = clock.now_ns()
        self._settled_s = self._disconnected_settled_s = _NEVER_S
        self._had_gap = asyncio.Event()

    def check_for_gap(self) -> None:
        """Detect a stall that has just ended, or a disconnection."""
        now_s, now_ns = self._clock.monotonic(), self._clock.now_ns()
        # The monotonic clock may stop together with the machine.
        gap_s = max(now_s - self._looked_s, (now_ns - self._looked_ns) / _NS_PER_S)
        self._looked_s, self._looked_ns = now_s, now_ns
        if not self._bus.connected:
            self.note_disconnected()
        elif gap_s > self._stall_s:
            logger.warning("this worker stalled", extra={"gap_s": round(gap_s, 3)})
            self._note_gap()

    def note_disconnected(self) -> None:
        """Record that the bus is or was disconnected: messages sent meanwhile are lost."""
        self._note_gap()
        self._disconnected_settled_s = self._settled_s

    def _note_gap(self) -> None:
        self._settled_s = self._clock.monotonic() + SETTLE_S
        self._had_gap.set()

    def is_confirmed(self, generation: Generation) -> bool:
        """Return whether this worker is known to own the lease right now."""
        self.check_for_gap()
        return generation.lease.confirmed_s >= self._settled_s

    async def confirm(self, generation: Generation) -> Ownership:
        """Return the ownership of the request: at once without a gap, else as soon as it is
        known.
        """
        while not self.is_confirmed(generation):
            wait_s = self._settled_s - self._clock.monotonic()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
                continue
            asked_s, epoch = self._clock.monotonic(), generation.epoch
            known = await self._generations.lookup(generation.request_id)
            if known is not None and known.epoch > generation.epoch:
                return Ownership.LOST
            self.check_for_gap()
            if asked_s < self._settled_s or generation.epoch != epoch:
                continue
            if known is None and generation.lease.confirmed_s < self._disconnected_settled_s:
                return Ownership.UNKNOWN
            generation.lease.confirmed_s = asked_s
        return Ownership.HELD

    async def run(self) -> None:
        """Check ownership after each gap, until cancelled."""
        while True:
            await self._had_gap.wait()
            self._had_gap.clear()
            await asyncio.gather(*map(self._drop_if_lost, list(self._held())))

    async def _drop_if_lost(self, generation: Generation) -> None:
        if await self.confirm(generation) is Ownership.LOST:
            self._on_lost(generation)


class LeaseKeeper:
    """Extender of held leases: every ``interval_s``, and at once after a reconnect."""

    def __init__(
        self,
        jobs: JobQueue,
        clock: Clock,
        interval_s: float,
        held: Callable[[], Iterable[str]],
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._interval_s = interval_s
        self._held = held
        self._now = asyncio.Event()

    def extend_now(self) -> None:
        """Extend all leases now: the bus was disconnected, and they may be about to lapse."""
        self._now.set()

    async def run(self) -> None:
        """Extend leases until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._extend_periodically(), name="extend leases")
            group.create_task(self._extend_on_request(), name="extend leases at once")

    async def _extend_periodically(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self._extend()

    async def _extend_on_request(self) -> None:
        while True:
            await self._now.wait()
            self._now.clear()
            await self._extend()

    async def _extend(self) -> None:
        for lease in list(self._held()):
            try:
                await self._jobs.extend(lease)
            except MillraceError as error:
                logger.warning("leases could not be extended", extra={"code": error.code})
                return
