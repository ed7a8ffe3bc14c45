"""Reports of a simulated worker: heartbeats and prefix cache contents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from millrace.schemas.control import PrefixReport, WorkerStatus
from millrace.schemas.jobs import Tier
from millrace.schemas.prefix import REPORTED_BYTES
from millrace.simulation.workers.context import FleetContext
from millrace.simulation.workers.leaps import LeapingBatch
from millrace.simulation.workers.moves import SimulatedMoves

# As in the real worker: an increase of free capacity above this share is announced at once.
_NOTABLE_SHARE = 1 / 8
_URGENT_GAP_S = 0.05


class WorkerIdentity(NamedTuple):
    """Identity of a worker. ``worker_id`` is of one incarnation; ``name`` stays across restarts."""

    worker_id: str
    name: str
    model: str


class Heartbeats:
    """Heartbeats of one incarnation, every ``heartbeat_s`` and when much capacity became free.

    Prefix reports follow heartbeats, at most every ``prefix_report_s``.
    """

    def __init__(
        self,
        context: FleetContext,
        identity: WorkerIdentity,
        moves: SimulatedMoves,
        phase: float,
        prefill_tokens_per_s: float,
    ) -> None:
        """Create heartbeats. ``phase``, 0 to 1, spreads the heartbeats of a fleet."""
        self.worker_id = identity.worker_id
        self.name = identity.name
        self.model = identity.model
        self.draining = False
        self._bus = context.bus
        self._clock = context.clock
        self._config = context.config
        self._moves = moves
        self._phase = phase
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._spawn = context.spawn
        self._started_ns = context.clock.now_ns()
        self._announced_s = 0.0
        self._announced_room = 0.0
        self._reported_s = float("-inf")
        self._num_reports = 0
        self._urgent: asyncio.Task[None] | None = None
        self._batch: LeapingBatch | None = None
        self._held: Callable[[], dict[Tier, int]] = dict

    def begin(self, batch: LeapingBatch, held: Callable[[], dict[Tier, int]]) -> None:
        """Set the batch. ``held`` returns the held requests by tier, including waits for blocks."""
        self._batch, self._held = batch, held

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        await self.announce()
        await self._clock.sleep(self._phase * self._config.heartbeat_s)
        while True:
            await self.announce()
            await self._report()
            await self._clock.sleep(self._config.heartbeat_s)

    async def drain(self) -> None:
        """Refuse new work from now on, and announce that at once."""
        self.draining = True
        await self.announce()

    def note_room(self) -> None:
        """Announce soon if much more capacity is free than was announced."""
        room = self._room()
        notable = room - self._announced_room >= _NOTABLE_SHARE
        if notable or room > 0 >= self._announced_room:
            self.announce_soon()

    def announce_soon(self) -> None:
        """Announce once the last announcement is not too recent."""
        if self._urgent is None or self._urgent.done():
            self._urgent = self._spawn(self._announce_soon())

    def stop(self) -> None:
        """Stop announcing."""
        if self._urgent is not None:
            self._urgent.cancel()

    async def _announce_soon(self) -> None:
        since_s = self._clock.monotonic() - self._announced_s
        if since_s < _URGENT_GAP_S:
            await self._clock.sleep(_URGENT_GAP_S - since_s)
        await self.announce()

    async def announce(self, *, retired: bool = False) -> None:
        self._announced_s = self._clock.monotonic()
        self._announced_room = self._room()
        await self._bus.workers.announce(self._status(retired=retired))

    def _room(self) -> float:
        """Return the free share of sequences or blocks, whichever is lower."""
        batch = self._begun
        capacity = batch.max_num_sequences + self._config.max_num_waiting
        num_held = sum(self._held().values())
        return min(1 - num_held / capacity, batch.blocks.num_free / batch.blocks.num_blocks)

    @property
    def _begun(self) -> LeapingBatch:
        assert self._batch is not None, "the worker has not begun"
        return self._batch

    def _status(self, *, retired: bool) -> WorkerStatus:
        batch = self._begun
        batch.settle(self._clock.monotonic())
        held = self._held()
        return WorkerStatus(
            worker_id=self.worker_id,
            name=self.name,
            model=self.model,
            max_num_sequences=batch.max_num_sequences,
            max_num_waiting=self._config.max_num_waiting,
            num_running=len(batch.running),
            num_waiting=sum(held.values()) - len(batch.running),
            block_size_tokens=self._config.engine.block_size_tokens,
            num_blocks=batch.blocks.num_blocks,
            num_free_blocks=batch.blocks.num_free,
            max_tokens_per_request=batch.capacity_tokens,
            outstanding_tokens=batch.outstanding_tokens,
            outstanding_prompt_tokens=batch.outstanding_prompt_tokens,
            num_held_by_tier=held,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_ms=batch.decode_step_s * 1e3,
            prefix_salted=self._config.prefix_scope == "tenant",
            weights=f"simulated {self.model}",
            num_devices=self._config.engine.tensor_parallel,
            role=self._moves.role,
            transfer=self._moves.endpoint,
            pull_tokens_per_s=self._moves.pull_tokens_per_s,
            outstanding_pull_tokens=self._moves.outstanding_pull_tokens,
            draining=self.draining,
            retired=retired,
            started_ns=self._started_ns,
            sent_ns=self._clock.now_ns(),
        )

    async def _report(self) -> None:
        every_s, now_s = self._config.prefix_report_s, self._clock.monotonic()
        # A heartbeat's interval may be shorter by a rounding error.
        if every_s <= 0 or now_s - self._reported_s < every_s - 1e-6:
            return
        changes = self._begun.blocks.take_changes()
        if changes is None and self._num_reports:
            return
        self._reported_s = now_s
        self._num_reports += 1
        whole = changes is None or changes.whole or self._num_reports == 1
        kept = [] if changes is None else changes.kept
        if whole:
            kept = kept[-self._config.max_reported_prefixes :]
        await self._bus.workers.report_prefixes(
            PrefixReport(
                worker_id=self.worker_id,
                model=self.model,
                number=self._num_reports,
                whole=whole,
                added=_joined(kept),
                removed=b"" if changes is None or whole else _joined(changes.gone),
            )
        )


def _joined(keys: list[bytes]) -> bytes:
    return b"".join([key[:REPORTED_BYTES] for key in keys])
