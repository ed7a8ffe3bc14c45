"""Completion events: tell the schedulers which requests have left a worker, and their usage."""

from __future__ import annotations

import asyncio
import logging

from millrace.bus.control import Control
from millrace.schemas.control import Ended, Served
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)


class CompletionEvents:
    """Publisher of completions: one message for all requests that ended in one turn of the loop. It
    is sent at most once.
    """

    def __init__(self, control: Control, worker_id: str) -> None:
        self._control = control
        self._worker_id = worker_id
        self._request_ids: list[str] = []
        self._served: list[Served] = []
        self._released: list[str] = []
        self._has_pending = asyncio.Event()

    def add(self, request_id: str, served: Served | None, *, released: bool = False) -> None:
        """Record that a request left this worker; ``released``: its lease was released."""
        self._request_ids.append(request_id)
        if released:
            self._released.append(request_id)
        self.add_served(served)

    def add_served(self, served: Served | None) -> None:
        """Record the usage of an attempt that is over; its request may continue here in another
        one.
        """
        if served is not None:
            self._served.append(served)
        self._has_pending.set()

    async def run(self) -> None:
        """Publish completions until cancelled."""
        while True:
            await self._has_pending.wait()
            await self.flush()

    async def flush(self) -> None:
        """Publish the completions so far."""
        self._has_pending.clear()
        ended = Ended(
            worker_id=self._worker_id,
            request_ids=tuple(self._request_ids),
            served=tuple(self._served),
            released=tuple(self._released),
        )
        if not ended.request_ids and not ended.served:
            return
        self._request_ids, self._served, self._released = [], [], []
        try:
            await self._control.publish_ended(ended)
        except MillraceError as error:
            # The schedulers find out from the queue.
            logger.warning("completion events could not be sent", extra={"code": error.code})
