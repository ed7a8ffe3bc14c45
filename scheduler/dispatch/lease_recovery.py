"""Lease recovery: after a start, release the leases of workers that died while no scheduler ran."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from millrace.scheduler.stages import watch
from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import WorkerStatus
from millrace.schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class LeaseRecovery:
    """Lease recovery after a start: releases the leases of workers that send no heartbeat.

    Without it, the leases of a worker that died together with its scheduler lapse one AckWait after
    their last extension. The bucket still has the worker's last status, and the index of running
    requests has its leases. A worker is given up after ``heartbeat_timeout_s`` without a heartbeat,
    as at any other time (``docs/protocol.md`` says what the worker does if it is alive). This
    process listens for at least half of that time. The age of the status in the bucket counts for
    the rest. Once the leases are released, the queue delivers each job at once, to one scheduler.
    All ``pullers`` then recount their jobs.
    """

    def __init__(self, state: SchedulerState, pullers: Mapping[str, JobPuller]) -> None:
        self._state = state
        self._pullers = pullers
        self._unheard: dict[str, int] = {}
        self._is_starting = True

    def note(self, status: WorkerStatus) -> None:
        """Record a status from the bucket or from a heartbeat.

        A status from the bucket does not prove that the worker is alive. Neither does a heartbeat
        with the same ``sent_ns`` as that status.
        """
        worker_id = status.worker_id
        if self._is_starting and worker_id not in self._unheard:
            self._unheard[worker_id] = status.sent_ns
        elif status.retired or self._unheard.get(worker_id) != status.sent_ns:
            self._unheard.pop(worker_id, None)

    def started(self) -> None:
        """Note that the bucket was read. Workers that are first seen from now on count as alive."""
        self._is_starting = False

    async def run(self) -> None:
        """Wait for heartbeats, then release the leases of workers that sent none.

        Time does not count while this process was paused or disconnected. A pause also voids the
        silence measured before the start.
        """
        state = self._state
        timeout_s = state.config.heartbeat_timeout_s
        silences_s = await self._silences_s()
        heard_s = 0.0
        while self._unheard:
            before_s = state.clock.monotonic()
            await state.clock.sleep(_LOOK_S)
            passed_s = state.clock.monotonic() - before_s
            if state.bus.connected and passed_s <= timeout_s / 2:
                heard_s += passed_s
            else:
                heard_s, silences_s = 0.0, {}
            silent = [
                worker_id
                for worker_id in self._unheard
                if heard_s + min(silences_s.get(worker_id, 0.0), timeout_s / 2) >= timeout_s
            ]
            for worker_id in silent:
                del self._unheard[worker_id]
                watch.departed(state, state.fleet.give_up(worker_id))
            if sum(await asyncio.gather(*map(self._release, silent))):
                for puller in self._pullers.values():
                    puller.recount()

    async def _silences_s(self) -> dict[str, float]:
        try:
            return await self._state.bus.workers.silences_s() if self._unheard else {}
        except MillraceError as error:
            logger.warning("the silence of workers is unknown", extra={"code": error.code})
            return {}

    async def _release(self, worker_id: str) -> int:
        """Release the leases of a silent worker and return their number."""
        leases = await self._state.running_requests.held_by(worker_id)
        released = await asyncio.gather(
            *(
                self._release_one(worker_id, request_id, lease)
                for request_id, lease in leases.items()
            )
        )
        if leases:
            logger.warning(
                "released the leases of a worker that died before this scheduler started",
                extra={"worker_id": worker_id, "num_requests": sum(released)},
            )
        return sum(released)

    async def _release_one(self, worker_id: str, request_id: str, lease: str) -> bool:
        known = await self._state.running_requests.lookup(request_id)
        holds_lease = known is not None and known.worker_id == worker_id and not known.finished
        if not holds_lease or self._state.job_table.get(request_id) is not None:
            return False
        try:
            await self._state.bus.jobs.release(lease)
        except BusUnavailableError:
            return False  # the lease lapses by itself
        return True
