"""Source of the snapshots of ``millrace top``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from millrace.bus.api import Bus
from millrace.cli.top.view import Snapshot, TenantRow, Totals, WorkerRow
from millrace.gateway.streams.fleet_view import FleetView
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.errors import MillraceError

_T = TypeVar("_T")

_ANSWER_WITHIN_S = 2.0
# Schedulers and workers report about twice a second.
_FIRST_REPORTS_S = 1.5
_POLL_S = 0.05
_WINDOW_S = 60
_MOST_TENANTS = 20


class SnapshotSource:
    """Source of snapshots: received heartbeats and queue statuses, and telemetry queries."""

    def __init__(self, bus: Bus, fleet: FleetView, place: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._place = place

    async def first_reports(self) -> None:
        """Wait until both workers and schedulers were heard of, or should have been."""
        for _ in range(round(_FIRST_REPORTS_S / _POLL_S)):
            if self._fleet.queues() and self._fleet.live_workers():
                return
            await asyncio.sleep(_POLL_S)

    async def snapshot(self) -> Snapshot:
        """Return the current state of the system; missing data is among the problems."""
        problems = [] if self._bus.connected else ["The message bus is unreachable; trying again."]
        window = {"from_s": -_WINDOW_S}
        try:
            totals, tenants, samples = await asyncio.gather(
                self._ask("totals", window, Totals),
                self._ask("top_tenants", {**window, "rows": _MOST_TENANTS}, TenantRow),
                self._ask("workers_now", {}, WorkerRow),
            )
        except (MillraceError, TimeoutError) as error:
            totals, tenants, samples = [], [], []
            reason = error.message if isinstance(error, MillraceError) else "it does not answer"
            problems.append(f"No figures of telemetry: {reason}")
        return Snapshot(
            at_s=time.time(),
            place=self._place,
            window_s=_WINDOW_S,
            totals=totals[0] if totals else None,
            tenants=tuple(tenants),
            queues=tuple(self._fleet.queues()),
            workers=tuple(self._fleet.live_workers()),
            samples=tuple(samples),
            problems=tuple(problems),
        )

    async def _ask(self, name: str, params: Mapping[str, int], row: type[_T]) -> list[_T]:
        query = TelemetryQuery(name=name, params=dict(params))
        answer = await self._bus.control.query_telemetry(query, _ANSWER_WITHIN_S)
        if answer is None:
            raise MillraceError("it does not answer")
        if answer.error:
            raise MillraceError(answer.error)
        try:
            return msgspec.json.decode(answer.rows_json, type=list[row], strict=False)  # type: ignore[valid-type]
        except msgspec.DecodeError as error:
            raise MillraceError(f"the answer to {name} is not of this version: {error}") from error
