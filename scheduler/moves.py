"""Streams that leave a worker which drains, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scheduler import placement
from scheduler.entry import Entry, State
from scheduler.parts import Parts
from scheduler.places import Places
from scheduler.worker_view import WorkerView

# A worker gets no more of them while its prompts before theirs take longer than this: what waits
# there for its turn would go on where it was meanwhile.
_LEAD_S = 0.05
_PAUSE_S = 0.02


class Moves:
    """Has others go on with what a worker of one model runs that drains, as far as there is room.

    A stream stands still from when its run is taken away until its tokens have been computed again
    elsewhere, so each leaves only when another worker has time for it. Those for whom time or room
    is never found stay, and end there or are given back. ``send`` gives one to a worker that has
    so many of its tokens cached.
    """

    def __init__(
        self, parts: Parts, model: str, send: Callable[[Entry, WorkerView, int], None]
    ) -> None:
        self._parts = parts
        self._model = model
        self._send = send
        self._moving: set[str] = set()
        self._stopped = False

    def stop(self) -> None:
        """Move nothing any more."""
        self._stopped = True

    def begin(self, worker: WorkerView) -> None:
        """Go on moving, if that is not under way. To be told at every heartbeat."""
        worker_id = worker.worker_id
        if worker_id not in self._moving and next(self._movable(worker), None) is not None:
            self._moving.add(worker_id)
            self._parts.tasks.spawn(self._move(worker_id), f"move from {worker_id}")

    async def _move(self, worker_id: str) -> None:
        try:
            while self._parts.bus.connected and not self._stopped:
                worker = self._parts.fleet.get(worker_id)
                if worker is None or not self._move_some(worker):
                    return
                await self._parts.clock.sleep(_PAUSE_S)
        finally:
            self._moving.discard(worker_id)

    def _move_some(self, worker: WorkerView) -> bool:
        """Whether there are more that could go in a moment."""
        places = Places(self._parts, self._model)
        for entry in self._movable(worker):
            place = places.find(entry)
            if place is None:
                continue  # one that is shorter, or of a higher tier, may fit
            if placement.prompts_ahead_s(place[0]) > _LEAD_S:
                return True
            self._send(entry, *place)
        return False

    def _movable(self, worker: WorkerView) -> Iterator[Entry]:
        """What runs there, but embeddings: they are over sooner than they would start elsewhere."""
        for request_id in list(worker.runs):
            entry = self._parts.table.get(request_id)
            if entry is not None and entry.state is State.RUNNING and entry.job.pooling is None:
                yield entry
