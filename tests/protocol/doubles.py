"""Detection of two workers that continue one request: wasted work, harmless only by epochs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.protocol.system import System, WorkerLife

_LOOK_EVERY_S = 0.1
# News that a request was taken away takes no longer than this in any weather, but for a worker
# that was out of touch: it has to find out by itself.
_TOLERATED_S = 0.8
_TO_FIND_OUT_S = 4.0
_NEVER_S = float("-inf")


async def watch_for_doubles(system: System) -> None:
    """Runs until it is cancelled."""
    out_of_touch_s: dict[str, float] = {}
    doubles_s: dict[str, float] = {}
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now_s = system.clock.monotonic()
        running: Counter[str] = Counter()
        for worker in system.workers.values():
            if not worker.process.is_alive:
                continue
            if _is_out_of_touch(system, worker):
                out_of_touch_s[worker.worker.worker_id] = now_s
            elif now_s - out_of_touch_s.get(worker.worker.worker_id, _NEVER_S) > _TO_FIND_OUT_S:
                running.update(worker.running())
        for request_id in [one for one in doubles_s if running[one] < 2]:
            del doubles_s[request_id]
        for request_id, count in running.items():
            if count > 1 and now_s - doubles_s.setdefault(request_id, now_s) > _TOLERATED_S:
                system.wrongs.append(f"{request_id} runs at {count} workers")


def _is_out_of_touch(system: System, worker: WorkerLife) -> bool:
    process = worker.process
    was_shaken, process.is_shaken = process.is_shaken, False
    is_away = process.is_cut or process.is_frozen or not system.broker.up
    return was_shaken or is_away or system.index.is_away
