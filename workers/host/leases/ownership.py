"""Whether a worker that was out of touch still has the requests that it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from enum import Enum, auto

from bus.api import Bus
from runtime.clock import Clock
from workers.host.generations.generation import Generation
from workers.host.leases.index import Generations

# From the time that the schedulers hear a worker again, they take nothing away from it for its
# silence; what they began before is in the index after this.
SETTLE_S = 2.0
_NS_PER_S = 1e9
_NEVER_S = float("-inf")

logger = logging.getLogger(__name__)


class Standing(Enum):
    """Whose a request is. UNKNOWN: perhaps another's, and nobody can say."""

    HELD = auto()
    LOST = auto()
    UNKNOWN = auto()


class Tenure:
    """Says whether what runs here may be ended here.

    A worker that stood still (stopped, swapped out) or that was cut off from the bus may have been
    given up for dead. Another then runs its requests at higher epochs, under the same leases, and
    the queue would take an ack from here for the other's. So after such a gap, of ``stall_s`` or
    of any length in the connection, what was dispatched before it or just after is in doubt until
    ``SETTLE_S`` have passed and the index knows of no higher epoch. News of those that were taken
    away is on its way to a worker that stood still. To one that was cut off it may be lost: if the
    index knows nothing of the request either, it stays in doubt.

    ``look`` is to be called more often than every ``stall_s``; ``run`` asks about all that
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
        self._settled_s = self._cut_settled_s = _NEVER_S
        self._had_gap = asyncio.Event()

    def look(self) -> None:
        """Notice a gap that has just ended, or that goes on."""
        now_s, now_ns = self._clock.monotonic(), self._clock.now_ns()
        # The monotonic clock may stand still together with the machine.
        away_s = max(now_s - self._looked_s, (now_ns - self._looked_ns) / _NS_PER_S)
        self._looked_s, self._looked_ns = now_s, now_ns
        if not self._bus.connected:
            self.note_cut()
        elif away_s > self._stall_s:
            logger.warning("this worker stood still", extra={"away_s": round(away_s, 3)})
            self._note_gap()

    def note_cut(self) -> None:
        """The connection to the bus is away, or was: what was sent meanwhile is lost."""
        self._note_gap()
        self._cut_settled_s = self._settled_s

    def _note_gap(self) -> None:
        self._settled_s = self._clock.monotonic() + SETTLE_S
        self._had_gap.set()

    def is_certain(self, generation: Generation) -> bool:
        """Whether the lease is surely this worker's, right now."""
        self.look()
        return generation.vouched_s >= self._settled_s

    async def confirm(self, generation: Generation) -> Standing:
        """Whose the request is; at once if there was no gap, else as soon as it can be known."""
        while not self.is_certain(generation):
            wait_s = self._settled_s - self._clock.monotonic()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
                continue
            asked_s, epoch = self._clock.monotonic(), generation.epoch
            known = await self._generations.lookup(generation.request_id)
            if known is not None and known.epoch > generation.epoch:
                return Standing.LOST
            self.look()
            if asked_s < self._settled_s or generation.epoch != epoch:
                continue
            if known is None and generation.vouched_s < self._cut_settled_s:
                return Standing.UNKNOWN
            generation.vouched_s = asked_s
        return Standing.HELD

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._had_gap.wait()
            self._had_gap.clear()
            await asyncio.gather(*map(self._drop_if_lost, list(self._held())))

    async def _drop_if_lost(self, generation: Generation) -> None:
        if await self.confirm(generation) is Standing.LOST:
            self._on_lost(generation)
