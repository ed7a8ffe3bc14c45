"""The runs of a job before the one that goes on, for its record."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from schemas.control import Served
from schemas.records import Life

# Beyond this many, the two oldest are told of as one.
MAX_LIVES = 16


class _Run(NamedTuple):
    """``is_taken``: its worker said so; ``is_told``: it said what the run took, too."""

    life: Life
    is_taken: bool = False
    is_told: bool = False


class Lives:
    """What is known of a job's runs, by epoch. Workers tell of a run when it is over there; what it
    took on one that was killed nobody knows."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._has_heard = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._runs)

    def sent(self, epoch: int, worker_id: str, sent_ns: int, *, is_taken: bool) -> None:
        """A dispatch went to a worker, which took it or did not answer: it began then at the
        earliest."""
        if epoch not in self._runs:
            life = Life(epoch=epoch, worker_id=worker_id, started_ns=sent_ns)
            self._add(_Run(life, is_taken))

    def found(self, epoch: int, worker_id: str) -> None:
        """The index knows of a run that another scheduler sent."""
        if epoch not in self._runs and worker_id:
            self._add(_Run(Life(epoch=epoch, worker_id=worker_id)))

    def told(self, served: Served, worker_id: str, now_ns: int) -> None:
        """A worker says what a run took that is over there. Earlier ones there that it says nothing
        of were the same, under other epochs."""
        if not served.epoch:
            return
        same = [
            epoch
            for epoch, run in self._runs.items()
            if epoch <= served.epoch and run.life.worker_id == worker_id and not run.is_told
        ]
        for epoch in same:
            del self._runs[epoch]
        life = Life(
            epoch=served.epoch,
            worker_id=worker_id,
            started_ns=served.started_ns,
            ended_ns=now_ns,
            device_us=served.device_us,
        )
        self._add(_Run(life, is_taken=True, is_told=True))
        self._has_heard.set()

    def end(self, now_ns: int) -> None:
        """None of them goes on."""
        for epoch, run in self._runs.items():
            if not run.life.ended_ns:
                self._runs[epoch] = run._replace(life=replace(run.life, ended_ns=now_ns))

    def before(self, worker_id: str = "") -> tuple[Life, ...]:
        """All of them, by epoch; for a worker without those that it may still go on with."""
        runs = sorted(self._runs.items())
        return tuple(run.life for _, run in runs if run.is_told or run.life.worker_id != worker_id)

    @property
    def awaited_worker_id(self) -> str:
        """The worker that took the last run, if it has not told of it so far; else empty."""
        if not self._runs:
            return ""
        last = self._runs[max(self._runs)]
        return last.life.worker_id if last.is_taken and not last.is_told else ""

    async def hear(self, timeout_s: float) -> None:
        """Wait until a worker tells of a run, as long as one may; it may be never."""
        self._has_heard.clear()
        try:
            async with asyncio.timeout(timeout_s):
                while self.awaited_worker_id:
                    await self._has_heard.wait()
                    self._has_heard.clear()
        except TimeoutError:
            return

    def _add(self, run: _Run) -> None:
        self._runs[run.life.epoch] = run
        if len(self._runs) > MAX_LIVES:
            first, second = (self._runs.pop(epoch).life for epoch in sorted(self._runs)[:2])
            device_us = first.device_us + second.device_us
            both = replace(first, ended_ns=second.ended_ns, device_us=device_us)
            self._runs[first.epoch] = _Run(both, is_taken=True, is_told=True)
