"""Tells the schedulers which requests a worker holds no more."""

from __future__ import annotations

import asyncio
import logging

from bus.api import Control
from schemas.control import Ended
from schemas.errors import MillraceError

logger = logging.getLogger(__name__)


class EndedNotices:
    """One message for all that ended in one turn of the loop; at most once."""

    def __init__(self, control: Control, worker_id: str) -> None:
        self._control = control
        self._worker_id = worker_id
        self._pending: list[str] = []
        self._has_pending = asyncio.Event()

    def add(self, request_id: str) -> None:
        self._pending.append(request_id)
        self._has_pending.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            ended, self._pending = tuple(self._pending), []
            try:
                await self._control.publish_ended(
                    Ended(worker_id=self._worker_id, request_ids=ended)
                )
            except MillraceError as error:
                # The schedulers find out from the queue.
                logger.warning("ends could not be told", extra={"code": error.code})
