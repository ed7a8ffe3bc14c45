"""After a start: release the leases of workers that died while no scheduler ran."""

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
    """Releases the leases of workers that are in the bucket and send no heartbeat, once, after a
    start.

    The leases of a worker that died together with its scheduler would lapse by themselves, one
    AckWait after they were extended last. But the bucket still has the worker's last status, and
    the index of running requests its leases. A worker without a heartbeat for
    ``heartbeat_timeout_s`` is given up, as at any other time (``docs/protocol.md`` says what it
    does if it lives): this process listens for at least half of that time, and the age of the
    status in the bucket counts for the rest. Once its leases are released, the queue delivers each
    job at once, to one scheduler. All ``pullers`` count their jobs again after that.
    """

    def __init__(self, state: SchedulerState, pullers: Mapping[str, JobPuller]) -> None:
        self._state = state
        self._pullers = pullers
        self._unheard: dict[str, int] = {}
        self._is_starting = True

    def note(self, status: WorkerStatus) -> None:
        """A status, from the bucket or a heartbeat. One in the bucket does not say that the worker
        lives, nor does a heartbeat that is the same one."""
        worker_id = status.worker_id
        if self._is_starting and worker_id not in self._unheard:
            self._unheard[worker_id] = status.sent_ns
        elif status.retired or self._unheard.get(worker_id) != status.sent_ns:
            self._unheard.pop(worker_id, None)

    def started(self) -> None:
        """The bucket was read; a worker that is new from now on lives."""
        self._is_starting = False

    async def run(self) -> None:
        """Wait for heartbeats, and release the leases of workers that send none. Time in which this
        process stood still, or was cut off, does not count, nor does the time before it."""
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
            logger.warning("how long workers were silent is unknown", extra={"code": error.code})
            return {}

    async def _release(self, worker_id: str) -> int:
        """Release the leases of a silent worker; how many there were."""
        leases = await self._state.running_requests.held_by(worker_id)
        released = await asyncio.gather(
            *(
                self._release_one(worker_id, request_id, lease)
                for request_id, lease in leases.items()
            )
        )
        if leases:
            logger.warning(
                "a worker was gone before this scheduler came",
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
            return False  # it lapses by itself
        return True
