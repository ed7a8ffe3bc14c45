"""Virtual token counters: how many tokens each member of a group was served.

Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class LazyMin(Generic[Key]):
    """Keys with a value each; ``least`` is the key of the smallest, of equal ones the one that has
    had it for longest. Setting costs O(log n), asking O(1) but for what changed meanwhile."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def set(self, key: Key, value: float) -> None:
        known = self._entries.get(key)
        if known is not None and known[0] == value:
            return
        number = next(self._numbers)
        self._entries[key] = (value, number)
        heapq.heappush(self._heap, (value, number, key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(value, number, key) for key, (value, number) in self._entries.items()]
            heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._entries.pop(key, None)

    def value(self, key: Key) -> float:
        """Raises KeyError."""
        return self._entries[key][0]

    def least(self) -> Key | None:
        while self._heap:
            value, number, key = self._heap[0]
            if self._entries.get(key) == (value, number):
                return key
            heapq.heappop(self._heap)
        return None


Member = TypeVar("Member", bound=Hashable)

_MAX_IDLE = 10_000


class VirtualTokens(Generic[Member]):
    """A counter of tokens served for each member. An active member is one with jobs to serve; the
    active member with the least counter is to be served next.

    A member that becomes active is lifted to the least counter of the active ones, or to that of
    the last one that was: an idle time earns no credit. So the counters of two members that are
    both active all the time differ by no more than the cost of what each has in service. Counters
    of idle members are kept, up to ``max_idle`` of them, so that a pause clears no debt. A counter
    never falls below what it was lifted to, even if less of an earlier charge was used.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._active: LazyMin[Member] = LazyMin()
        self._floors: dict[Member, float] = {}
        self._idle: OrderedDict[Member, float] = OrderedDict()
        self._last_stop = 0.0

    def __len__(self) -> int:
        """How many members are active."""
        return len(self._active)

    def begin(self, member: Member) -> None:
        """The member is active from now on."""
        if member in self._active:
            return
        least = self._active.least()
        floor = self._last_stop if least is None else self._active.value(least)
        self._floors[member] = floor
        self._active.set(member, max(self._idle.pop(member, floor), floor))

    def end(self, member: Member) -> None:
        """The member is idle from now on."""
        if member not in self._active:
            return
        counter = self._active.value(member)
        self._active.discard(member)
        del self._floors[member]
        if not len(self._active):
            self._last_stop = max(self._last_stop, counter)
        self._set_idle(member, counter)

    def charge(self, member: Member, tokens: float) -> None:
        """Count tokens as served, or as charged too much if they are negative."""
        if member in self._active:
            counter = self._active.value(member) + tokens
            self._active.set(member, max(counter, self._floors[member]))
        else:
            self._set_idle(member, self._idle.pop(member, self._floor()) + tokens)

    def counter(self, member: Member) -> float:
        if member in self._active:
            return self._active.value(member)
        return self._idle.get(member, self._floor())

    def floored_counter(self, member: Member) -> float:
        """The counter, or what it would be lifted to if the member became active now."""
        return max(self.counter(member), self._floor())

    def spread(self) -> float:
        """The most that two active members differ by."""
        values = [self._active.value(member) for member in self._active]
        return max(values) - min(values) if values else 0.0

    def _floor(self) -> float:
        least = self._active.least()
        return self._last_stop if least is None else self._active.value(least)

    def _set_idle(self, member: Member, counter: float) -> None:
        self._idle[member] = counter
        self._idle.move_to_end(member)
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)
