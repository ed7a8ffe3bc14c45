"""Which slot of llama.cpp's server a request is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Assignment(NamedTuple):
    """A slot by its number; ``may_reuse``: what it has cached is of the same salt."""

    number: int
    may_reuse: bool


class _Slot:
    def __init__(self) -> None:
        self.salt: str | None = None
        self.prompt: tuple[int, ...] = ()
        self.num_requests = 0
        self.used = 0


class Slots:
    """Chooses, for each request, the slot that has the fewest others; among these, of the same
    salt, the one whose last prompt has the longest beginning in common with its own, else the one
    that was unused for longest. The server works off the requests of a slot in order."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of_request: dict[str, Assignment] = {}
        self._clock = 0

    @property
    def share_in_use(self) -> float:
        """Of the slots, 0 to 1."""
        return sum(slot.num_requests > 0 for slot in self._slots) / len(self._slots)

    def slot_of(self, request_id: str) -> Assignment | None:
        """What ``begin`` chose, until ``end``."""
        return self._of_request.get(request_id)

    def begin(self, request_id: str, salt: str, prompt: Sequence[int]) -> None:
        """Choose a slot for a request."""
        self._clock += 1
        fewest = min(slot.num_requests for slot in self._slots)
        free = [n for n, slot in enumerate(self._slots) if slot.num_requests == fewest]
        own = [n for n in free if self._slots[n].salt == salt]
        if own:
            number = max(own, key=lambda n: _num_common(self._slots[n].prompt, prompt))
        else:
            number = min(free, key=lambda n: self._slots[n].used)
        slot = self._slots[number]
        self._of_request[request_id] = Assignment(number, slot.salt == salt)
        slot.salt, slot.prompt, slot.used = salt, tuple(prompt), self._clock
        slot.num_requests += 1

    def end(self, request_id: str) -> None:
        """The request has left the server."""
        assignment = self._of_request.pop(request_id, None)
        if assignment is not None:
            self._slots[assignment.number].num_requests -= 1


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
