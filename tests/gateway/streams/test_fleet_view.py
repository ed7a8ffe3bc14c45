"""Workers that a gateway counts."""

from __future__ import annotations

from millrace.gateway.streams.fleet_view import FleetView
from millrace.schemas.control import WorkerStatus
from tests.support.manual_clock import ManualClock


def _status(worker_id: str, started_ns: int, *, retired: bool = False) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id,
        name="w",
        model="m",
        max_num_sequences=4,
        started_ns=started_ns,
        retired=retired,
    )


def _live(fleet: FleetView) -> list[str]:
    return sorted(worker.worker_id for worker in fleet.live_workers())


async def test_a_new_life_takes_the_place_of_the_former() -> None:
    fleet = FleetView(ManualClock())
    fleet.on_worker(_status("w-1", 1))
    fleet.on_worker(_status("w-2", 2))
    assert _live(fleet) == ["w-2"]
    fleet.on_worker(_status("w-1", 1, retired=True))
    assert _live(fleet) == ["w-2"]


async def test_two_that_run_under_one_name_are_two() -> None:
    clock = ManualClock()
    fleet = FleetView(clock)
    for _ in range(3):
        fleet.on_worker(_status("w-1", 1))
        fleet.on_worker(_status("w-2", 2))
    assert _live(fleet) == ["w-1", "w-2"]
    fleet.on_worker(_status("w-2", 2, retired=True))
    assert _live(fleet) == ["w-1"]
    await clock.advance(4.0)
    assert _live(fleet) == [], "silent for too long"
