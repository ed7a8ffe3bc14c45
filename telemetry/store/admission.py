"""Admission of queries: the number that runs at once, and their order."""

from __future__ import annotations

import asyncio
from collections import Counter

from millrace.telemetry.store.reading import TOO_MANY_QUERIES, QueryError


class QueryAdmission:
    """Admission of at most ``max_running`` queries, and at most ``max_per_user`` of one user.

    The next place goes to a query of the user with the fewest running queries; of several such
    queries, to the oldest.
    """

    def __init__(
        self, max_running: int, max_per_user: int, max_waiting: int, max_wait_s: float
    ) -> None:
        self._max_running = max_running
        self._max_per_user = min(max_per_user, max_running)
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def enter(self, user: str) -> None:
        """Wait for a place; ``leave`` gives it back. Raises QueryError after ``max_wait_s``, and at
        once when too many queries wait."""
        if not self._waiting and self._is_free_for(user):
            self._running[user] += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise self._refuse(user)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (user, place)
        self._waiting.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await place
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not place.cancelled():
                self.leave(user)
            if isinstance(error, TimeoutError):
                raise self._refuse(user) from error
            raise

    def leave(self, user: str) -> None:
        """Give back the place of a query of the user."""
        self._running[user] -= 1
        if not self._running[user]:
            del self._running[user]
        self._admit()

    def _admit(self) -> None:
        while True:
            open_to = [each for each in self._waiting if self._is_free_for(each[0])]
            if not open_to:
                return
            chosen = min(open_to, key=lambda each: self._running[each[0]])
            self._waiting.remove(chosen)
            user, place = chosen
            if not place.done():
                self._running[user] += 1
                place.set_result(None)

    def _is_free_for(self, user: str) -> bool:
        return (
            self._running.total() < self._max_running and self._running[user] < self._max_per_user
        )

    def _refuse(self, user: str) -> QueryError:
        return QueryError.refusing(
            TOO_MANY_QUERIES,
            f"Too many simultaneous queries: {self._running.total()} of {self._max_running} run, "
            f"{self._running[user]} of {self._max_per_user} of this user, and "
            f"{len(self._waiting)} wait. Ask again later. (TOO_MANY_SIMULTANEOUS_QUERIES)",
        )
