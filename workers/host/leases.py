"""Whether a worker that stalled or was disconnected still owns the leases of its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from enum import Enum, auto

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.leases.index import Generations

# Once schedulers receive its heartbeats again, they take nothing away from a worker for silence;
# takeovers that they began before are in the index after this.
SETTLE_S = 2.0
_NS_PER_S = 1e9
_NEVER_S = float("-inf")

logger = logging.getLogger(__name__)


class Ownership(Enum):
    """Whether this worker owns a request's lease. UNKNOWN: perhaps not, and it cannot be known."""

    HELD = auto()
    LOST = auto()
    UNKNOWN = auto()


class LeaseOwnership:
    """Confirms that what runs here may be finalized here.

    A worker that stalled (stopped, swapped out) or was disconnected from the bus may have been
    declared dead. Another then runs its requests at higher epochs, under the same leases, and the
    queue would take an ack from here for the other's. So after such a gap, a stall of ``stall_s``
    or a disconnection of any length, requests dispatched before it or just after are unconfirmed
    until ``SETTLE_S`` have passed and the index has no higher epoch. Cancels of requests taken over
    still reach a worker that stalled. To one that was disconnected they may be lost: if the index
    does not know the request either, its ownership stays unknown.

    ``check_for_gap`` is to be called more often than every ``stall_s``; ``run`` asks about all that
    ``held`` gives after each gap, and calls ``on_lost`` for what is another's.
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
        # The monotonic clock may stand still together with the machine.
        gap_s = max(now_s - self._looked_s, (now_ns - self._looked_ns) / _NS_PER_S)
        self._looked_s, self._looked_ns = now_s, now_ns
        if not self._bus.connected:
            self.note_disconnected()
        elif gap_s > self._stall_s:
            logger.warning("this worker stalled", extra={"gap_s": round(gap_s, 3)})
            self._note_gap()

    def note_disconnected(self) -> None:
        """The bus is or was disconnected: messages sent meanwhile are lost."""
        self._note_gap()
        self._disconnected_settled_s = self._settled_s

    def _note_gap(self) -> None:
        self._settled_s = self._clock.monotonic() + SETTLE_S
        self._had_gap.set()

    def is_confirmed(self, generation: Generation) -> bool:
        """Whether this worker is known to own the lease right now."""
        self.check_for_gap()
        return generation.lease.confirmed_s >= self._settled_s

    async def confirm(self, generation: Generation) -> Ownership:
        """Who owns the request; at once without a gap, else as soon as it can be known."""
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
        """Runs until it is cancelled."""
        while True:
            await self._had_gap.wait()
            self._had_gap.clear()
            await asyncio.gather(*map(self._drop_if_lost, list(self._held())))

    async def _drop_if_lost(self, generation: Generation) -> None:
        if await self.confirm(generation) is Ownership.LOST:
            self._on_lost(generation)
