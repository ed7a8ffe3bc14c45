"""Writes which worker runs which request into the shared index, in the background."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.bus.running_requests import RunningRequest

_MAX_PENDING = 10_000


class Generations(Protocol):
    """The index as a worker uses it; ``bus.running_requests`` is the one. Calls never raise: while
    the index is unreachable nothing is known, and heartbeats and leases decide."""

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None: ...

    async def drop(self, request_id: str, worker_id: str) -> None: ...

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None: ...

    async def lookup(self, request_id: str) -> RunningRequest | None: ...


class IndexWriter:
    """Queues writes; while the index is slow the oldest are dropped."""

    def __init__(self, generations: Generations, worker_id: str) -> None:
        self._generations = generations
        self._worker_id = worker_id
        self._pending: deque[Callable[[], Awaitable[None]]] = deque(maxlen=_MAX_PENDING)
        self._has_pending = asyncio.Event()

    def start(self, request_id: str, epoch: int, lease: str) -> None:
        """This worker runs the request, under a lease."""
        self._add(lambda: self._generations.start(request_id, self._worker_id, epoch, lease))

    def drop(self, request_id: str) -> None:
        """This worker runs the request no more, and has not answered it."""
        self._add(lambda: self._generations.drop(request_id, self._worker_id))

    def finish(self, request_id: str, epoch: int) -> None:
        """The request is answered."""
        self._add(lambda: self._generations.finish(request_id, self._worker_id, epoch))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            writes = list(self._pending)
            self._pending.clear()
            # Made together, they travel together.
            await asyncio.gather(*(write() for write in writes))

    def _add(self, write: Callable[[], Awaitable[None]]) -> None:
        self._pending.append(write)
        self._has_pending.set()
