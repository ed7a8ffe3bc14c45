"""Background tasks that are never forgotten and never fail in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Owns what it spawns until it is done; ``close`` ends what is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "a task failed", extra={"task": task.get_name()}, exc_info=task.exception()
            )

    async def close(self, timeout_s: float = 0.0) -> None:
        """Give them ``timeout_s`` to finish, then cancel the rest."""
        if self._tasks and timeout_s > 0:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
