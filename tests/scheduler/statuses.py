"""Heartbeats to make views of."""

from __future__ import annotations

from typing import Any

from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.schemas.control import WorkerStatus

NOW_NS = 1_700_000_000_000_000_000


def status(worker_id: str = "w-1", name: str = "", **changes: Any) -> WorkerStatus:
    """An idle worker with 4 slots and 100 blocks."""
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "name": name or worker_id.split("-")[0],
        "model": "m",
        "max_num_sequences": 4,
        "num_blocks": 100,
        "num_free_blocks": 100,
        "started_ns": NOW_NS,
        "sent_ns": NOW_NS,
    } | changes
    return WorkerStatus(**fields)


def view(worker_id: str = "w-1", **changes: Any) -> WorkerView:
    """Return the view of a worker that was heard at time 0."""
    return WorkerView(status(worker_id, **changes), 0.0)


def view_of(fleet: Fleet, worker_id: str) -> WorkerView:
    found = fleet.get(worker_id)
    assert found is not None
    return found
