"""What one process knows of a store in Redis that changes seldom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.runtime.tasks import Tasks

# How long a change may go unseen by those who are not asked for what is new in it.
_LOOK_EVERY_S = 1.0

_ItemT = TypeVar("_ItemT")
_ItemT_co = TypeVar("_ItemT_co", covariant=True)


class ChangingStore(Protocol[_ItemT_co]):
    """Calls raise RedisUnreachableError while Redis is unreachable."""

    async def all(self) -> Sequence[_ItemT_co]: ...

    async def number_of_changes(self) -> int:
        """Another one after each change."""


class WatchedStore(Generic[_ItemT]):
    """All items of a store, as they were at most a second ago; while Redis is unreachable they stay
    as they were. Owns the task that looks, which ``close`` ends."""

    def __init__(
        self,
        store: ChangingStore[_ItemT] | None,
        clock: Clock,
        what: str,
        name_of: Callable[[_ItemT], str],
    ) -> None:
        """Without a store there are none. ``what`` they are called, and each by ``name_of``."""
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
        """Take in what has changed."""
        if self._watched is None:
            return
        try:
            changes = await self._watched.number_of_changes()
            if changes != self._changes:
                self._items = {self._name_of(one): one for one in await self._watched.all()}
                self._changes = changes
        except RedisUnreachableError:
            return  # the link logs that, once
