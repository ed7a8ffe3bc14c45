"""Status of a worker: heartbeats for schedulers, samples for analytics."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from millrace.engine.types import EngineStats
from millrace.runtime.clock import until_beat_s
from millrace.schemas.control import QueueStatus, WorkerStatus
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Tier
from millrace.schemas.records import WorkerSample
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.energy import EnergyTotals
from millrace.workers.host.reports.device_watch import DeviceReading, DeviceWatch

_URGENT_GAP_S = 0.05
_NOTABLE_SHARE = 1 / 8
_US_PER_S = 1e6
_NS_PER_S = 1e9
# Sampling interval of a worker at rest. Samples fall on the full and half minute, so those of all
# workers come together and each covers little of the minute before its own.
_REST_S = 30.0
# Heartbeat interval of a worker at rest, in beats. Its silence still counts from its last beat, and
# schedulers know what they have sent to it.
_REST_BEATS = 2

logger = logging.getLogger(__name__)


class Pulls(Protocol):
    """Pull state that the reporter reads, implemented by ``moves.StreamMoves``."""

    @property
    def role(self) -> WorkerRole: ...

    @property
    def pull_tokens_per_s(self) -> float: ...


class WorkerRequestCounts(Protocol):
    """Request counts of the worker, implemented by ``workers.host.requests.Requests``."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_ending(self) -> int: ...

    def num_held_by_tier(self) -> dict[Tier, int]: ...

    @property
    def moves(self) -> Pulls: ...


class StatusReporter:
    """Publisher of heartbeats and samples.

    Heartbeats are sent every ``heartbeat_s``, half as often while the worker is idle, and sooner
    when much capacity becomes free. Samples are sent every ``sample_interval_s`` while the worker
    is busy, and every ``_REST_S`` while it is idle.

    The engine's own counts lag those of ``load`` by up to a step. ``num_samples_lost`` samples
    could not be stored; the next sample covers their time.
    """

    def __init__(
        self, context: WorkerContext, load: WorkerRequestCounts, device: DeviceWatch
    ) -> None:
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._engine = context.engine
        self._entry = context.model.entry
        self._load = load
        self._device = device
        self._started_ns = self._clock.now_ns()
        self._draining = False
        self._announced_capacity = 0.0
        self._urgent = asyncio.Event()
        self._queue_depth = 0
        self._sampled_s, self._sampled = self._clock.monotonic(), self._engine.stats
        self._energy = context.energy
        self._sampled_energy = EnergyTotals()
        self._is_resting = False
        self._rested_until_s = self._sampled_s
        self.num_samples_lost = 0

    def drain(self) -> None:
        """Announce at once that the worker takes no new work from now on."""
        self._draining = True
        self._urgent.set()

    def announce_soon(self) -> None:
        """Send a heartbeat soon."""
        self._urgent.set()

    def note_capacity(self) -> None:
        """Send a heartbeat soon if much more capacity is free than the schedulers know of."""
        capacity = self._free_share()
        if capacity - self._announced_capacity >= _NOTABLE_SHARE or (
            capacity > 0 >= self._announced_capacity
        ):
            self._urgent.set()

    def note_queue(self, status: QueueStatus) -> None:
        """Remember the length of the model's queue."""
        if status.model == self._entry.name:
            self._queue_depth = status.num_queued

    def status(self, *, retired: bool = False) -> WorkerStatus:
        stats, num_live = self._engine.stats, self._load.num_running
        num_running = min(stats.num_running, num_live)
        return WorkerStatus(
            worker_id=self._context.worker_id,
            name=self._config.name,
            model=self._entry.name,
            max_num_sequences=self._engine.max_num_sequences,
            max_num_waiting=self._config.max_num_waiting,
            num_running=num_running,
            num_waiting=num_live - num_running,
            num_held_by_tier=self._load.num_held_by_tier(),
            num_ending=self._load.num_ending,
            block_size_tokens=self._config.engine.block_size_tokens,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            max_tokens_per_request=min(
                stats.max_tokens_per_request, self._context.model.context_window_tokens
            ),
            outstanding_tokens=stats.outstanding_tokens,
            outstanding_prompt_tokens=stats.outstanding_prompt_tokens,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_ms=stats.decode_step_ms,
            prefix_salted=self._config.prefix_scope == "tenant",
            weights=self._engine.weights,
            adapters=stats.adapters,
            max_adapters=stats.max_adapters,
            adapter_load_ms=stats.adapter_load_ms,
            num_devices=self._engine.num_devices,
            role=self._load.moves.role,
            transfer=self._engine.transfer_endpoint,
            pull_tokens_per_s=self._load.moves.pull_tokens_per_s,
            outstanding_pull_tokens=stats.outstanding_pull_tokens,
            draining=self._draining,
            engine_down=self._engine.is_down,
            retired=retired,
            started_ns=self._started_ns,
            sent_ns=self._clock.now_ns(),
        )

    async def announce(self, *, retired: bool = False) -> None:
        self._announced_capacity = self._free_share()
        try:
            await self._context.bus.workers.announce(self.status(retired=retired))
        except MillraceError as error:
            # The schedulers notice missing heartbeats.
            logger.warning("a heartbeat could not be sent", extra={"code": error.code})

    async def run(self) -> None:
        """Send heartbeats and samples until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(), name="heartbeats")
            group.create_task(self._beat_urgently(), name="urgent heartbeats")
            group.create_task(self._sample(), name="samples")

    async def _beat(self) -> None:
        while True:
            await self.announce()
            for _ in range(_REST_BEATS):
                await self._clock.sleep(until_beat_s(self._clock, self._config.heartbeat_s))
                if not self._has_rested():
                    break

    async def _beat_urgently(self) -> None:
        while True:
            await self._urgent.wait()
            self._urgent.clear()
            await self.announce()
            await self._clock.sleep(_URGENT_GAP_S)

    async def _sample(self) -> None:
        while True:
            before_s = self._clock.monotonic()
            await self._clock.sleep(until_beat_s(self._clock, self._config.sample_interval_s))
            if not self._has_rested():
                await self.sample()
            elif not self._is_resting or self._is_rest_due(before_s):
                # The first sample of a rest is sent at once, so that displays are up to date.
                self._is_resting = await self.sample()
            else:
                self._rested_until_s = self._clock.monotonic()

    def _has_rested(self) -> bool:
        """Return whether nothing has happened since the last sample."""
        is_idle = not self._load.num_running and not self._queue_depth
        return is_idle and self._engine.stats == self._sampled

    def _is_rest_due(self, before_s: float) -> bool:
        """Return whether a half minute of the wall clock has begun since ``before_s``."""
        now_s = self._clock.now_ns() / _NS_PER_S
        passed_s = self._clock.monotonic() - before_s
        return now_s // _REST_S > (now_s - passed_s) // _REST_S

    async def sample(self) -> bool:
        """Publish a sample of the time since the last one, or since the start. Return whether it is
        stored.

        A rest that has just ended gets a sample of its own first.
        """
        device = await self._device.read()
        await self._energy.read()
        if self._is_resting and not self._has_rested():
            self._is_resting = False
            if self._rested_until_s > self._sampled_s:
                energy = self._energy.totals and max(self._energy.rest_totals, self._sampled_energy)
                rested = self._make_sample(self._sampled, self._rested_until_s, device, energy)
                await self._store(rested, self._sampled, self._rested_until_s, energy)
        stats, now_s = self._engine.stats, self._clock.monotonic()
        num_held, queue_depth = self._load.num_running, self._queue_depth
        energy = self._energy.totals
        sample = self._make_sample(stats, now_s, device, energy, num_held, queue_depth)
        return await self._store(sample, stats, now_s, energy)

    async def _store(
        self,
        sample: WorkerSample,
        stats: EngineStats,
        until_s: float,
        energy: EnergyTotals | None,
    ) -> bool:
        before_s, before, energy_before = self._sampled_s, self._sampled, self._sampled_energy
        self._sampled_s, self._sampled = until_s, stats
        self._sampled_energy = energy or energy_before
        try:
            await self._context.bus.outbox.publish(sample)
        except MillraceError as error:
            # The next sample covers this time too: its device time has been charged.
            if self._sampled is stats:
                self._sampled_s, self._sampled = before_s, before
                self._sampled_energy = energy_before
            self.num_samples_lost += 1
            logger.warning("a sample could not be stored", extra={"code": error.code})
            return False
        return True

    def _make_sample(
        self,
        stats: EngineStats,
        until_s: float,
        device: DeviceReading,
        energy: EnergyTotals | None,
        num_held: int = 0,
        queue_depth: int = 0,
    ) -> WorkerSample:
        """Return a sample of the time from the last sample until ``until_s``."""
        before, period_s = self._sampled, until_s - self._sampled_s
        ago_s = self._clock.monotonic() - until_s
        num_steps = stats.num_steps - before.num_steps
        block_size = self._config.engine.block_size_tokens
        busy_s = stats.busy_s - before.busy_s
        num_devices = self._engine.num_devices
        return WorkerSample(
            worker_id=self._context.worker_id,
            name=self._config.name,
            model=self._entry.name,
            sampled_ns=self._clock.now_ns() - round(ago_s * _NS_PER_S),
            period_ms=period_s * 1e3,
            num_running=stats.num_running,
            num_waiting=max(0, num_held - stats.num_running),
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_steps=num_steps,
            step_ms_mean=busy_s * 1e3 / num_steps if num_steps else 0.0,
            busy_share=min(1.0, busy_s / period_s) if period_s else 0.0,
            prefill_tokens=stats.prefill_tokens - before.prefill_tokens,
            decode_tokens=stats.decode_tokens - before.decode_tokens,
            num_preemptions=stats.num_preemptions - before.num_preemptions,
            queue_depth=queue_depth,
            busy_us=num_devices * _passed_us(before.busy_s, stats.busy_s),
            charged_us=num_devices * _passed_us(before.charged_s, stats.charged_s),
            prefix_query_tokens=stats.prefix_query_tokens - before.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens - before.prefix_hit_tokens,
            device_name=device.name,
            device_share=device.share,
            device_memory_bytes=device.memory_bytes,
            device_memory_total_bytes=device.memory_total_bytes,
            device_per_hour=self._entry.prices.device_per_hour,
            currency=self._entry.prices.currency,
            energy_j=None if energy is None else energy.counted_j - self._sampled_energy.counted_j,
            charged_j=None if energy is None else energy.charged_j - self._sampled_energy.charged_j,
            role=self._load.moves.role,
            pulled_tokens=(stats.num_pulled_blocks - before.num_pulled_blocks) * block_size,
            served_tokens=(stats.num_served_blocks - before.num_served_blocks) * block_size,
            num_devices=num_devices,
        )

    def _free_share(self) -> float:
        """Return the free share of the scarcer resource: sequences or blocks."""
        stats = self._engine.stats
        sequences = 1 - self._load.num_running / self._context.capacity
        return min(sequences, stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0)


def _passed_us(before_s: float, after_s: float) -> int:
    """Return the difference in µs, rounded so that consecutive differences add up."""
    return round(after_s * _US_PER_S) - round(before_s * _US_PER_S)
