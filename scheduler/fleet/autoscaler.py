"""How many workers a model should have."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from millrace.schemas.config import AutoscaleConfig

# Slots that are used beyond this share leave too little for a burst.
_TARGET_SLOT_SHARE = 0.8
# What ends more seldom than this says nothing of how fast a worker is.
_SLOWEST_PER_S = 1e-3


class Signals(NamedTuple):
    """How a model stands. ``per_s`` requests end a second; ``num_slots`` are those of one worker;
    ``kv_share`` of the workers' KV blocks are used; ``wait_s`` is predicted for a job that comes
    now (None: nobody can say)."""

    num_workers: int
    num_queued: int
    num_held: int
    num_slots: int
    kv_share: float
    per_s: float
    wait_s: float | None
    oldest_wait_s: float


class Autoscaler:
    """Follows the need up at once and down late. Pure: the caller passes the time in.

    What is needed is the most of three: what holds the requests that are in service, what keeps
    the KV cache below its target, and what works off the queue, with all that comes meanwhile, by
    the time that new workers could be there and jobs have waited as long as they may.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._needed: deque[tuple[float, int]] = deque()
        self._last_queued: tuple[float, int] | None = None
        self._busy_s: float | None = None

    def desired(self, signals: Signals, now_s: float) -> int:
        """How many workers there should be now; 0 also where nothing is to be scaled."""
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
        # The most that was needed of late: a need that comes and goes starts and stops nothing.
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
