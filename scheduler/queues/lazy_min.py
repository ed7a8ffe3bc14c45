"""The least of values that change often, asked for even more often."""

from __future__ import annotations

import heapq
import itertools
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
