"""Which slot of llama.cpp's server a request is given."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class SlotAssignment(NamedTuple):
    """A slot by its number; ``may_reuse``: what it has cached is of the same salt."""

    number: int
    may_reuse: bool


class _Wish(NamedTuple):
    """A request that waits for a slot; in the order in which they are served."""

    rank: tuple[int, int]
    request_id: str
    salt: str
    prompt: tuple[int, ...]
    turn: asyncio.Future[None]


class _Slot:
    def __init__(self) -> None:
        self.salt: str | None = None
        self.prompt: tuple[int, ...] = ()
        self.is_free = True
        self.used = 0


class SlotTable:
    """Gives each request a slot of its own, those of higher priority first, then in the order in
    which they came. Among free slots of the same salt it is the one whose last prompt has the
    longest beginning in common with its own, else the one that was unused for longest."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of_request: dict[str, SlotAssignment] = {}
        self._waiting: list[_Wish] = []
        self._order = itertools.count()

    @property
    def share_in_use(self) -> float:
        """Of the slots, 0 to 1."""
        return sum(not slot.is_free for slot in self._slots) / len(self._slots)

    def slot_of(self, request_id: str) -> SlotAssignment | None:
        """What ``acquire`` gave, until ``release``."""
        return self._of_request.get(request_id)

    async def acquire(
        self, request_id: str, salt: str, prompt: Sequence[int], priority: int = 0
    ) -> None:
        """Returns once the request has a slot."""
        turn = asyncio.get_running_loop().create_future()
        rank = (-priority, next(self._order))
        heapq.heappush(self._waiting, _Wish(rank, request_id, salt, tuple(prompt), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            self.release(request_id)
            raise

    def release(self, request_id: str) -> None:
        """The request has left the server, or was never there."""
        assignment = self._of_request.pop(request_id, None)
        if assignment is not None:
            self._slots[assignment.number].is_free = True
            self._give()

    def _give(self) -> None:
        """The free slots to those who wait."""
        while self._waiting and any(slot.is_free for slot in self._slots):
            wish = heapq.heappop(self._waiting)
            if wish.turn.done():
                continue  # it was cancelled
            number = self._choose(wish.salt, wish.prompt)
            slot = self._slots[number]
            self._of_request[wish.request_id] = SlotAssignment(number, slot.salt == wish.salt)
            slot.salt, slot.prompt, slot.is_free = wish.salt, wish.prompt, False
            slot.used = next(self._order)
            wish.turn.set_result(None)

    def _choose(self, salt: str, prompt: Sequence[int]) -> int:
        free = [number for number, slot in enumerate(self._slots) if slot.is_free]
        own = [number for number in free if self._slots[number].salt == salt]
        if own:
            return max(own, key=lambda number: _num_common(self._slots[number].prompt, prompt))
        return min(free, key=lambda number: self._slots[number].used)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
