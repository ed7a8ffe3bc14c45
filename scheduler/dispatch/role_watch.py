"""Role switches: change the roles of workers as the load of each role demands."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from millrace.runtime.tasks import Tasks
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.placement.placement import work_ahead_s
from millrace.scheduler.placement.role_balance import RoleBalancer, RoleChange, WorkerLoad
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import SetRole
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


class RoleWatch:
    """Role switches by each scheduler's own decision.

    A scheduler must take the model's turn on the bus before a change. One scheduler gets it, and no
    other changes roles until the effect is visible. A worker changes its role only if it still has
    the role that the scheduler saw.

    ``num_changes`` counts this scheduler's changes by model and role. ``start`` makes the task,
    ``close`` ends it.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._balancers: dict[str, RoleBalancer] = {}
        self.num_changes: Counter[tuple[str, str]] = Counter()
        self._tasks = Tasks()

    def start(self) -> None:
        if self._state.config.switch_roles:
            self._tasks.repeat(self.look, _LOOK_EVERY_S, self._state.clock, "balance roles")

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self) -> None:
        """Decide on the roles of each model's workers."""
        for model in self._balancers.keys() - self._state.model_queues.keys():
            del self._balancers[model]
        for model in list(self._state.model_queues):
            now_s = self._state.clock.monotonic()
            loads = [
                _load_of(worker, now_s)
                for worker in self._state.fleet.of_model(model)
                if not worker.status.draining and not worker.status.engine_down
            ]
            balancer = self._balancers.setdefault(model, RoleBalancer())
            changes = balancer.look(loads, now_s)
            if changes and self._state.bus.connected:
                balancer.note_change(changes[0].role, now_s)
                await self._change(model, changes)

    async def _change(self, model: str, changes: list[RoleChange]) -> None:
        try:
            if await self._state.bus.workers.take_role_turn(model):
                await asyncio.gather(*(self._change_one(model, change) for change in changes))
        except MillraceError as error:
            logger.info("worker roles were not changed", extra={"reason": error.message})

    async def _change_one(self, model: str, change: RoleChange) -> None:
        command = SetRole(role=change.role, from_role=change.from_role)
        timeout_s = self._state.config.dispatch_timeout_s
        reply = await self._state.bus.control.command(change.worker_id, command, timeout_s)
        if reply is not None and reply.ok:
            self.num_changes[model, change.role.value] += 1
            logger.info(
                "changed a worker's role",
                extra={
                    "model": model,
                    "worker_id": change.worker_id,
                    "role": change.role.value,
                    "before": change.from_role.value,
                },
            )
        else:
            logger.warning(
                "a worker did not change its role",
                extra={
                    "worker_id": change.worker_id,
                    "reason": "no answer" if reply is None else reply.reason,
                },
            )


def _load_of(worker: WorkerView, now_s: float) -> WorkerLoad:
    worker.advance(now_s)
    status = worker.status
    used = status.num_blocks - status.num_free_blocks
    return WorkerLoad(
        worker.worker_id,
        status.role,
        work_ahead_s(worker),
        max(min(worker.num_held_per_slot, 1.0), used / max(status.num_blocks, 1)),
        worker.step_growth,
        status.num_running + status.num_waiting,
        status.outstanding_prompt_tokens + status.outstanding_pull_tokens,
    )
