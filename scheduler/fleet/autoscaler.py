"""Autoscaler: the desired number of workers of a model."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from millrace.schemas.config import AutoscaleConfig

# Share of used slots above which too few are left for a burst.
_TARGET_SLOT_SHARE = 0.8
# Rates below this do not show how fast a worker is.
_SLOWEST_PER_S = 1e-3


class Signals(NamedTuple):
    """Load of a model.

    ``per_s`` is the rate at which requests end. ``num_slots`` is the slots of one worker.
    ``kv_share`` is the used share of the workers' KV blocks, 0 to 1. ``wait_s`` is the predicted
    wait of a new job (None: unknown).
    """

    num_workers: int
    num_queued: int
    num_held: int
    num_slots: int
    kv_share: float
    per_s: float
    wait_s: float | None
    oldest_wait_s: float


class Autoscaler:
    """Autoscaler of one model: scales up at once and down late. Pure: the caller passes the time.

    The need is the maximum of three numbers of workers: enough slots for the requests in service,
    enough KV blocks to stay below the target share, and enough speed to clear the queue. The queue
    with its growth must be cleared within the target wait plus the cold start.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._needed: deque[tuple[float, int]] = deque()
        self._last_queued: tuple[float, int] | None = None
        self._busy_s: float | None = None

    def desired(self, signals: Signals, now_s: float) -> int:
        """Return the desired number of workers; 0 also if autoscaling is off."""
        config = self._config
        if not config.is_on:
            return 0
        if self._busy_s is None or signals.num_queued or signals.num_held:
            self._busy_s = now_s
        needed = max(self._for_load(signals), self._for_queue(signals, now_s)) + config.warm
        if signals.num_queued or now_s - self._busy_s < config.idle_s:
            needed = max(needed, 1)
        floor = config.min_workers
        needed = min(max(needed, floor), config.max_workers)
        # Use the maximum of the recent needs, so a need that fluctuates starts and stops no worker.
        self._needed.append((now_s, needed))
        while len(self._needed) > 1 and self._needed[0][0] <= now_s - config.scale_down_after_s:
            self._needed.popleft()
        return max(count for _, count in self._needed)

    def _for_load(self, signals: Signals) -> int:
        slots = _TARGET_SLOT_SHARE * max(signals.num_slots, 1)
        for_slots = math.ceil(signals.num_held / slots) if signals.num_held else 0
        share = signals.kv_share / self._config.target_kv_share
        for_blocks = math.ceil(signals.num_workers * share - 1e-9) if signals.num_held else 0
        return max(for_slots, for_blocks)

    def _for_queue(self, signals: Signals, now_s: float) -> int:
        config = self._config
        before, self._last_queued = self._last_queued, (now_s, signals.num_queued)
        if not signals.num_queued:
            return 0
        if not signals.num_workers:
            return 1
        wait_s = max(signals.wait_s or 0.0, signals.oldest_wait_s)
        if wait_s <= config.target_wait_s:
            return 0
        if signals.per_s < _SLOWEST_PER_S:
            return signals.num_workers + 1
        grown_per_s = 0.0
        if before is not None and now_s > before[0]:
            grown_per_s = (signals.num_queued - before[1]) / (now_s - before[0])
        within_s = config.target_wait_s + config.cold_start_s
        wanted_per_s = max(signals.per_s + grown_per_s, 0.0) + signals.num_queued / within_s
        each_per_s = signals.per_s / signals.num_workers
        needed = min(wanted_per_s / each_per_s, config.max_workers)
        return max(math.ceil(needed), signals.num_workers)
