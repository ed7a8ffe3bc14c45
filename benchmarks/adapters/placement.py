"""Share of requests whose adapter is loaded on their worker, by the scheduler's own placement.

Compared with placement that ignores adapters, in virtual time.
"""

from __future__ import annotations

import collections
import random
from typing import Final

import msgspec

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.scheduler.placement import placement
from millrace.schemas.control import WorkerStatus
from millrace.schemas.models.adapters import LoadedAdapter

NUM_ADAPTERS: Final = 100
NUM_SLOTS: Final = 20
NUM_WORKERS: Final = 2
_NUM_REQUESTS, _NUM_WARM = 20_000, 2_000
_NUM_AT_ONCE = 24
_HEARTBEAT_REQUESTS = 4
_LOAD_MS = 50.0


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates of requests for adapters, by Zipf's law with the exponent ``skew``."""

    skew: float
    affine: float
    least_loaded: float


class _Worker:
    """Worker whose slots are reused in LRU order, except those of running requests."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._slots: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._running: collections.Counter[str] = collections.Counter()
        self.view = WorkerView(self._status(), 0.0)

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker_id=f"w{self._number}-1",
            name=f"w{self._number}",
            model="m",
            max_num_sequences=64,
            num_running=self._running.total(),
            num_blocks=10_000,
            num_free_blocks=10_000 - 10 * self._running.total(),
            prefill_tokens_per_s=10_000.0,
            decode_step_ms=10.0,
            max_adapters=NUM_SLOTS,
            adapter_load_ms=_LOAD_MS,
            adapters=tuple(LoadedAdapter(name, name, self._running[name]) for name in self._slots),
        )

    def beat(self, now_s: float) -> None:
        for request_id in self.view.runs:
            self.view.confirm(request_id)
        self.view.observe(self._status(), now_s)

    def begin(self, adapter: str) -> bool:
        """Take a request; return whether its adapter was loaded."""
        hit = adapter in self._slots
        self._slots[adapter] = None
        self._slots.move_to_end(adapter)
        self._running[adapter] += 1
        for name in list(self._slots):
            if len(self._slots) <= NUM_SLOTS:
                break
            if not self._running[name]:
                del self._slots[name]
        return hit

    def end(self, adapter: str) -> None:
        self._running[adapter] -= 1


def hit_rates(skew: float, seed: int = 1) -> HitRates:
    """Return the hit rates of both policies for the same requests."""
    return HitRates(
        skew=skew,
        affine=_hit_rate("affine", skew, seed),
        least_loaded=_hit_rate("least_loaded", skew, seed),
    )


def _hit_rate(policy: placement.Policy, skew: float, seed: int) -> float:
    pick = random.Random(seed)
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    weights = [1 / (number + 1) ** skew for number in range(NUM_ADAPTERS)]
    workers = [_Worker(number) for number in range(NUM_WORKERS)]
    by_id = {worker.view.worker_id: worker for worker in workers}
    running: collections.deque[tuple[str, _Worker, str]] = collections.deque()
    num_hits = 0
    for number in range(_NUM_REQUESTS):
        now_s = number * 0.05
        if len(running) == _NUM_AT_ONCE:
            request_id, worker, adapter = running.popleft()
            worker.end(adapter)
            worker.view.release(request_id)
        (adapter,) = pick.choices(names, weights)
        resources = ResourceRequest(200, 100, adapter=adapter)
        views = [worker.view for worker in workers]
        chosen = placement.choose(views, resources, {}, 100.0, policy, now_s)
        assert chosen is not None
        chosen.reserve(str(number), resources, 100.0)
        worker = by_id[chosen.worker_id]
        num_hits += worker.begin(adapter) and number >= _NUM_WARM
        running.append((str(number), worker, adapter))
        if number % _HEARTBEAT_REQUESTS == 0:
            for each in workers:
                each.beat(now_s)
    return num_hits / (_NUM_REQUESTS - _NUM_WARM)
