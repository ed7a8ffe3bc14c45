"""Answers jobs of models that nobody knows, which no lane would ever pull."""

from __future__ import annotations

import logging
from collections.abc import Collection

from bus.api import LeasedJob
from scheduler.dispatch.context import Parts
from scheduler.jobs.entry import Entry
from scheduler.jobs.tenant_queues import TenantQueueCounts
from scheduler.jobs.terminal_status import refused
from schemas.errors import BusUnavailableError, ModelNotFoundError

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_MAX_AT_ONCE = 64


class Strays:
    """Looks through the queue now and then; ``known_models`` is the whole catalogue."""

    def __init__(self, parts: Parts, known_models: Collection[str]) -> None:
        self._parts = parts
        self._known_models = frozenset(known_models)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            if self._parts.bus.connected:
                try:
                    await self.look()
                except BusUnavailableError as error:
                    logger.warning(
                        "the queue cannot be looked through", extra={"reason": error.message}
                    )
            await self._parts.clock.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Refuse what waits for unknown models now. Raises BusUnavailableError."""
        jobs = self._parts.bus.jobs
        for line in await jobs.lines():
            if line.model not in self._known_models:
                for leased in await jobs.pull(line, _MAX_AT_ONCE, 0.0):
                    await self._refuse(leased)
                await jobs.forget_line(line)

    async def _refuse(self, leased: LeasedJob) -> None:
        known = ", ".join(sorted(self._known_models))
        error = ModelNotFoundError(
            f"There is no model {leased.job.model!r} here. The models are: {known}."
        )
        entry = Entry.of(leased, TenantQueueCounts(), self._parts.clock.monotonic())
        await self._parts.endings.end(entry, refused(error))
