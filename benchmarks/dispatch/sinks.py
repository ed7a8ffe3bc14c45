"""Workers that take every job at once, note when it came, and acknowledge it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine

from benchmarks.support.simulated_system import MODEL
from millrace.bus.api import Bus
from millrace.bus.transport import Subscription
from millrace.schemas.control import (
    Dispatch,
    Ended,
    Served,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from tests.support.waiting import eventually

_HEARTBEAT_S = 0.5
# Ends are told together, as workers do.
_ENDED_INTERVAL_S = 0.005
_OK = WorkerReply(ok=True)
_NO = WorkerReply(ok=False, reason="bad_request", message="dispatches alone are known")


class Sinks:
    """``count`` workers with ``num_slots`` each, on one connection, from ``start`` to ``close``.
    ``received_s`` is when each job came, by ``time.perf_counter``."""

    def __init__(self, bus: Bus, count: int, num_slots: int) -> None:
        self.received_s: dict[str, float] = {}
        self.num_slots = num_slots
        self._bus = bus
        self._num_held = {f"sink-{number}": 0 for number in range(count)}
        self._ended: dict[str, list[Served]] = {}
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for worker_id in self._num_held:
            self._subscriptions.append(
                await self._bus.control.serve_commands(worker_id, self._handler(worker_id))
            )
        self._keep(self._beat())
        self._keep(self._tell_ends())

    async def set_slots(self, num_slots: int) -> None:
        """From now on each has room for so many; everybody hears so at once."""
        self.num_slots = num_slots
        await self._announce()

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Until so many jobs have come in all."""
        await eventually(lambda: len(self.received_s) >= count, timeout_s=timeout_s)

    async def close(self) -> None:
        """Retires them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.close()
        await self._announce(retired=True)

    def _handler(self, worker_id: str) -> Callable[[WorkerCommand], Awaitable[WorkerReply]]:
        async def handle(command: WorkerCommand) -> WorkerReply:
            if not isinstance(command, Dispatch):
                return _NO
            self.received_s[command.job.request_id] = time.perf_counter()
            self._num_held[worker_id] += 1
            self._keep(self._end(worker_id, command))
            return _OK

        return handle

    async def _end(self, worker_id: str, dispatch: Dispatch) -> None:
        await self._bus.jobs.ack(dispatch.lease)
        self._num_held[worker_id] -= 1
        job = dispatch.job
        served = Served(
            request_id=job.request_id,
            tenant=job.tenant,
            tier=job.tier,
            prompt_tokens=len(job.prompt_token_ids or ()),
            completion_tokens=job.sampling.max_tokens or 0,
        )
        self._ended.setdefault(worker_id, []).append(served)

    async def _tell_ends(self) -> None:
        while True:
            await asyncio.sleep(_ENDED_INTERVAL_S)
            ended, self._ended = self._ended, {}
            for worker_id, served in ended.items():
                await self._bus.control.publish_ended(
                    Ended(
                        worker_id=worker_id,
                        request_ids=tuple(one.request_id for one in served),
                        served=tuple(served),
                    )
                )

    async def _beat(self) -> None:
        while True:
            await self._announce()
            await asyncio.sleep(_HEARTBEAT_S)

    async def _announce(self, *, retired: bool = False) -> None:
        for worker_id, num_held in self._num_held.items():
            await self._bus.workers.announce(
                WorkerStatus(
                    worker_id=worker_id,
                    name=worker_id,
                    model=MODEL,
                    max_num_sequences=self.num_slots,
                    num_running=num_held,
                    started_ns=1,
                    sent_ns=time.time_ns(),
                    retired=retired,
                )
            )

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
