"""Starting and stopping workers as the schedulers want, with processes that are not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from millrace.bus.fleet.role_shares import RoleShares
from millrace.cli.local.scrape_targets import TargetedProcesses
from millrace.cli.local.supervisor import Process, StartError
from millrace.cli.local.worker_pool import WorkerPool, WorkerScaler
from millrace.schemas.control import QueueStatus, WorkerStatus
from millrace.schemas.engines import WorkerRole
from tests.support.manual_clock import ManualClock

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
# Longer than a figure of the schedulers counts.
LATER_S = 4.0


class Processes:
    """Processes start and stop when the test says so."""

    def __init__(self) -> None:
        self.starting: dict[str, asyncio.Future[None]] = {}
        self.stopping: dict[str, asyncio.Future[None]] = {}
        self.up: set[str] = set()
        self.starts: list[str] = []

    async def start(self, process: Process) -> None:
        assert process.name not in self.up | self.starting.keys() | self.stopping.keys()
        self.starts.append(process.name)
        self.starting[process.name] = asyncio.get_running_loop().create_future()
        try:
            await self.starting[process.name]
            self.up.add(process.name)
        finally:
            del self.starting[process.name]

    async def remove(self, name: str) -> None:
        assert name not in self.starting
        if name not in self.up:
            return
        self.stopping[name] = asyncio.get_running_loop().create_future()
        await self.stopping[name]
        del self.stopping[name]
        self.up.remove(name)

    def started(self, *names: str) -> None:
        for name in names:
            self.starting[name].set_result(None)

    def failed(self, name: str) -> None:
        self.starting[name].set_exception(StartError(f"{name} ended before it was ready"))

    def stopped(self, name: str) -> None:
        self.stopping[name].set_result(None)


class Workers:
    """Fake workers with the statuses of ``held`` and ``roles``; ``started`` has the new ones."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.roles: dict[str, WorkerRole] = {}
        self.started: dict[str, WorkerRole] = {}
        self.role_shares = RoleShares()

    def new_worker(self, name: str, model: str, role: WorkerRole) -> Process:
        self.started[name] = role
        return Process(name=name, command=(model,))

    def status(self, name: str) -> WorkerStatus | None:
        if name not in self.held and name not in self.roles:
            return None
        return WorkerStatus(
            worker_id=f"{name}-id",
            name=name,
            model="demo",
            max_num_sequences=8,
            num_running=self.held.get(name, 0),
            role=self.roles.get(name, self.started.get(name, WorkerRole.BOTH)),
        )

    def shares(self, model: str) -> RoleShares:
        return self.role_shares if model == "demo" else RoleShares()


class Rig:
    """A scaler of two models that may have 4 workers each, and begins with worker-1 of ``demo``."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.processes = Processes()
        self.processes.up.add("worker-1")
        self.workers = Workers()
        self.said: list[str] = []
        self.scaler = WorkerScaler(
            cast(TargetedProcesses, self.processes),
            cast(WorkerPool, self.workers),
            4,
            self.clock,
            self.said.append,
        )
        self.scaler.adopt("worker-1", "demo", WorkerRole.BOTH)

    async def hear(self, desired: int, model: str = "demo", after_s: float = 0.0) -> None:
        """A scheduler publishes its figure every second for ``after_s``, and then."""
        until_s = self.clock.monotonic() + after_s
        while self.clock.monotonic() + 1.0 < until_s:
            await self.clock.advance(1.0)
            self._publish(desired, model)
        await self.clock.advance(until_s - self.clock.monotonic())
        self._publish(desired, model)
        await self.settle()

    def _publish(self, desired: int, model: str) -> None:
        self.scaler.on_queue(
            QueueStatus(model=model, num_queued=0, bound=10, desired_workers=desired)
        )

    async def settle(self) -> None:
        await self.clock.advance(0.0)

    async def has_up(self, *names: str) -> None:
        """Report that ``names`` run besides worker-1, as the scaler desires."""
        await self.hear(1 + len(names))
        self.processes.started(*names)
        await self.settle()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.scaler.close()


async def test_wanted_workers_start_once_and_in_parallel(rig: Rig) -> None:
    await rig.hear(3)
    await rig.hear(3, after_s=0.25)
    assert rig.processes.starts == ["worker-2", "worker-3"]
    assert rig.said == [
        "worker-2 is starting: 3 are wanted for demo",
        "worker-3 is starting: 3 are wanted for demo",
    ]


async def test_no_more_than_the_most_are_started(rig: Rig) -> None:
    await rig.hear(100)
    assert len(rig.processes.starts) == 3


async def test_models_have_workers_of_their_own(rig: Rig) -> None:
    await rig.hear(1, model="large")
    await rig.hear(2)
    assert rig.processes.starts == ["worker-2", "worker-3"]
    assert rig.said[0].endswith("for large")


async def test_nothing_stops_while_any_scheduler_wanted_more_of_late(rig: Rig) -> None:
    await rig.has_up("worker-2")
    await rig.hear(1, after_s=1.0)
    assert rig.processes.stopping == {}
    await rig.hear(1, after_s=LATER_S)
    assert list(rig.processes.stopping) == ["worker-2"]


async def test_a_scheduler_that_starts_anew_stops_nothing_at_first(rig: Rig) -> None:
    await rig.has_up("worker-2")
    await rig.clock.advance(60.0)
    await rig.hear(1)
    await rig.hear(2, after_s=1.0)
    assert rig.processes.stopping == {}
    await rig.hear(2, after_s=LATER_S)
    assert rig.processes.stopping == {}
    await rig.hear(1, after_s=LATER_S)
    assert list(rig.processes.stopping) == ["worker-2"]


async def test_the_least_loaded_is_stopped_then_the_youngest(rig: Rig) -> None:
    await rig.has_up("worker-2", "worker-3", "worker-4")
    rig.workers.held = {"worker-1": 5, "worker-2": 1, "worker-3": 3, "worker-4": 3}
    await rig.hear(1, after_s=LATER_S)
    assert list(rig.processes.stopping) == ["worker-2"]
    rig.processes.stopped("worker-2")
    await rig.hear(1, after_s=0.25)
    assert list(rig.processes.stopping) == ["worker-4"]


async def test_one_drains_after_the_other(rig: Rig) -> None:
    await rig.has_up("worker-2", "worker-3")
    await rig.hear(1, after_s=LATER_S)
    await rig.hear(1, after_s=0.25)
    assert list(rig.processes.stopping) == ["worker-3"]
    rig.processes.stopped("worker-3")
    await rig.hear(1, after_s=0.25)
    assert list(rig.processes.stopping) == ["worker-2"]


async def test_a_start_that_is_not_wanted_any_more_is_given_up(rig: Rig) -> None:
    await rig.has_up("worker-2")
    await rig.hear(3, after_s=LATER_S)
    rig.workers.held = {"worker-1": 0, "worker-2": 0}
    await rig.hear(2, after_s=LATER_S)
    assert rig.processes.starting == {}
    assert rig.processes.up == {"worker-1", "worker-2"}
    await rig.hear(3)
    assert rig.processes.starts == ["worker-2", "worker-3", "worker-3"]


async def test_a_name_is_not_used_again_while_the_old_process_is_there(rig: Rig) -> None:
    await rig.has_up("worker-2")
    await rig.hear(1, after_s=LATER_S)
    await rig.hear(2, after_s=0.25)
    assert list(rig.processes.stopping) == ["worker-2"]
    assert list(rig.processes.starting) == ["worker-3"]


async def test_a_model_may_scale_to_zero_and_back(rig: Rig) -> None:
    await rig.hear(0, after_s=LATER_S)
    assert list(rig.processes.stopping) == ["worker-1"]
    rig.processes.stopped("worker-1")
    await rig.hear(1, after_s=1.0)
    assert list(rig.processes.starting) == ["worker-1"]


async def test_a_start_that_fails_is_said_and_tried_again_ever_later(rig: Rig) -> None:
    await rig.hear(2)
    rig.processes.failed("worker-2")
    await rig.hear(2, after_s=0.25)
    assert rig.said[-1] == "worker-2 ended before it was ready"
    assert rig.processes.starting == {}
    await rig.hear(2, after_s=1.0)
    rig.processes.failed("worker-2")
    await rig.hear(2, after_s=1.5)
    assert rig.processes.starting == {}
    await rig.hear(2, after_s=0.5)
    assert list(rig.processes.starting) == ["worker-2"]
    assert len(rig.processes.starts) == 3


async def test_a_start_that_works_makes_up_for_those_that_failed(rig: Rig) -> None:
    await rig.hear(2)
    rig.processes.failed("worker-2")
    await rig.settle()
    await rig.hear(2, after_s=1.0)
    rig.processes.started("worker-2")
    await rig.hear(3, after_s=0.25)
    assert list(rig.processes.starting) == ["worker-3"]


async def test_two_workers_that_fail_together_cost_one_pause(rig: Rig) -> None:
    await rig.hear(3)
    rig.processes.failed("worker-2")
    rig.processes.failed("worker-3")
    await rig.settle()
    await rig.hear(3, after_s=1.0)
    assert list(rig.processes.starting) == ["worker-2", "worker-3"]


async def test_a_closed_scaler_starts_and_stops_nothing(rig: Rig) -> None:
    await rig.hear(3)
    await rig.scaler.close()
    assert rig.processes.starting == {}
    await rig.hear(4, after_s=1.0)
    assert len(rig.processes.starts) == 2


async def test_workers_that_come_and_go_keep_the_shares_of_roles(rig: Rig) -> None:
    rig.workers.role_shares = RoleShares((_PREFILL, _DECODE))
    rig.scaler.adopt("worker-1", "demo", _PREFILL)
    await rig.has_up("worker-2", "worker-3", "worker-4")
    assert list(rig.workers.started.values()) == [_DECODE, _PREFILL, _DECODE]
    await rig.hear(1, after_s=LATER_S)
    assert list(rig.processes.stopping) == ["worker-4"], "prompts are left one of two"
    rig.processes.stopped("worker-4")
    await rig.hear(1)
    assert list(rig.processes.stopping) == ["worker-3"]


async def test_roles_that_were_changed_count_as_they_are(rig: Rig) -> None:
    rig.workers.role_shares = RoleShares((_PREFILL, _DECODE))
    rig.scaler.adopt("worker-1", "demo", _PREFILL)
    rig.workers.roles["worker-1"] = _DECODE
    await rig.has_up("worker-2")
    assert rig.workers.started == {"worker-2": _PREFILL}


async def test_a_model_of_no_roles_has_workers_for_both(rig: Rig) -> None:
    rig.workers.role_shares = RoleShares((_PREFILL, _DECODE))
    await rig.hear(1, model="large")
    assert rig.workers.started == {"worker-2": WorkerRole.BOTH}
