"""The attempts to run a job: their epochs, where each ran, and what it took there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from millrace.schemas.control import Served
from millrace.schemas.records import Attempt, sum_energy

# Beyond this many, the two oldest are kept as one.
MAX_ATTEMPTS_KEPT = 16


class _KnownAttempt(NamedTuple):
    """``is_accepted``: its worker said so; ``is_reported``: it said what the attempt took, too."""

    attempt: Attempt
    is_accepted: bool = False
    is_reported: bool = False


@dataclass(slots=True)
class AttemptHistory:
    """What is known of a job's attempts.

    ``epoch`` is that of the last one that began or may have begun, 0 before the first;
    ``epoch_floor`` the highest that somebody else is known to have run at, ``claimed_epoch`` the
    last below which we told everybody to stop. ``num_started`` were sent by this scheduler,
    ``num_lost`` with their workers, which ``max_attempts`` bounds.

    A worker reports an attempt when it is over there; what it took on a worker that was killed
    nobody knows.
    """

    epoch: int = 0
    epoch_floor: int = 0
    claimed_epoch: int = 0
    num_started: int = 0
    num_lost: int = 0
    _by_epoch: dict[int, _KnownAttempt] = field(default_factory=dict)
    _reported: asyncio.Event | None = None

    def __bool__(self) -> bool:
        return bool(self._by_epoch)

    @property
    def highest_epoch(self) -> int:
        """That we ran it at, or told others to stop below."""
        return max(self.epoch, self.claimed_epoch)

    def add_sent(self, worker_id: str, sent_ns: int, *, is_accepted: bool) -> None:
        """A dispatch of ``epoch`` went to a worker, which accepted it or did not answer: it began
        then at the earliest."""
        if self.epoch not in self._by_epoch:
            attempt = Attempt(epoch=self.epoch, worker_id=worker_id, started_ns=sent_ns)
            self._add(_KnownAttempt(attempt, is_accepted))

    def add_found(self, epoch: int, worker_id: str) -> None:
        """The index knows of an attempt that another scheduler sent."""
        if epoch not in self._by_epoch and worker_id:
            self._add(_KnownAttempt(Attempt(epoch=epoch, worker_id=worker_id)))

    def add_report(self, served: Served, worker_id: str, now_ns: int) -> None:
        """A worker says what an attempt took that is over there. Earlier ones there that it says
        nothing of were the same, under other epochs."""
        if not served.epoch:
            return
        same = [
            epoch
            for epoch, one in self._by_epoch.items()
            if epoch <= served.epoch and one.attempt.worker_id == worker_id and not one.is_reported
        ]
        for epoch in same:
            del self._by_epoch[epoch]
        attempt = Attempt(
            epoch=served.epoch,
            worker_id=worker_id,
            started_ns=served.started_ns,
            ended_ns=now_ns,
            device_us=served.device_us,
            energy_j=served.energy_j,
            cached_tokens=served.cached_tokens,
            pulled_tokens=served.pulled_tokens,
            kv_source=served.kv_source,
        )
        self._add(_KnownAttempt(attempt, is_accepted=True, is_reported=True))
        if self._reported is not None:
            self._reported.set()

    def close(self, now_ns: int) -> None:
        """None of them goes on."""
        for epoch, one in self._by_epoch.items():
            if not one.attempt.ended_ns:
                self._by_epoch[epoch] = one._replace(attempt=replace(one.attempt, ended_ns=now_ns))

    def earlier(self, worker_id: str = "") -> tuple[Attempt, ...]:
        """All of them, by epoch; for a worker without those that it may still continue."""
        known = sorted(self._by_epoch.items())
        return tuple(
            one.attempt for _, one in known if one.is_reported or one.attempt.worker_id != worker_id
        )

    @property
    def unreported_worker_id(self) -> str:
        """The worker that accepted the last attempt, if it has not reported it so far; else
        empty."""
        if not self._by_epoch:
            return ""
        last = self._by_epoch[max(self._by_epoch)]
        return last.attempt.worker_id if last.is_accepted and not last.is_reported else ""

    async def wait_for_report(self, timeout_s: float) -> None:
        """Wait until the last attempt is reported, if it may be; ``timeout_s`` at most."""
        self._reported = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                while self.unreported_worker_id:
                    await self._reported.wait()
                    self._reported.clear()
        except TimeoutError:
            return

    def _add(self, known: _KnownAttempt) -> None:
        self._by_epoch[known.attempt.epoch] = known
        if len(self._by_epoch) > MAX_ATTEMPTS_KEPT:
            first, second = (
                self._by_epoch.pop(epoch).attempt for epoch in sorted(self._by_epoch)[:2]
            )
            device_us = first.device_us + second.device_us
            both = replace(
                first,
                ended_ns=second.ended_ns,
                device_us=device_us,
                energy_j=sum_energy((first.energy_j, second.energy_j)),
                pulled_tokens=first.pulled_tokens + second.pulled_tokens,
                kv_source=second.kv_source or first.kv_source,
            )
            self._by_epoch[first.epoch] = _KnownAttempt(both, is_accepted=True, is_reported=True)
