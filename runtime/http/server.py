"""uvicorn's server without what it does ten times a second, and without hands on the signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

# The date of responses is of this second.
_DATE_S = 1.0


class ManagedServer(uvicorn.Server):
    """Signals are handled by whoever runs the process.

    It ends when it is told to, for which uvicorn looks ten times a second; at rest it wakes once a
    second instead, for the date.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Have ``serve`` close every connection and return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S - loop.time() % _DATE_S):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None is captured."""
        yield
