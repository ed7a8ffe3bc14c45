"""Copy of a Redis store that changes rarely, kept by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.runtime.tasks import Tasks

# Longest time until a change is seen by readers that do not look themselves.
_LOOK_EVERY_S = 1.0

_ItemT = TypeVar("_ItemT")
_ItemT_co = TypeVar("_ItemT_co", covariant=True)


class ChangingStore(Protocol[_ItemT_co]):
    """Store with a change counter. Calls raise RedisUnreachableError."""

    async def all(self) -> Sequence[_ItemT_co]: ...

    async def number_of_changes(self) -> int:
        """Return a number that differs after each change."""


class WatchedStore(Generic[_ItemT]):
    """Items of a store, at most a second old.

    They stay as they were while Redis is unreachable. Owns the task that looks, which ``close``
    ends.
    """

    def __init__(
        self,
        store: ChangingStore[_ItemT] | None,
        clock: Clock,
        what: str,
        name_of: Callable[[_ItemT], str],
    ) -> None:
        """Watch a store; without one there are no items.

        Args:
            store: The store.
            clock: The clock.
            what: Name of the items in the task's name.
            name_of: Returns an item's name.
        """
        self._watched = store
        self._clock = clock
        self._what = what
        self._name_of = name_of
        self._items: dict[str, _ItemT] = {}
        self._changes = -1
        self._tasks = Tasks()

    def start(self) -> None:
        if self._watched is not None:
            self._tasks.repeat(self.look, _LOOK_EVERY_S, self._clock, f"watch the {self._what}")

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self) -> None:
        """Reload the items if the store has changed."""
        if self._watched is None:
            return
        try:
            changes = await self._watched.number_of_changes()
            if changes != self._changes:
                self._items = {self._name_of(one): one for one in await self._watched.all()}
                self._changes = changes
        except RedisUnreachableError:
            return  # the link logs it once
