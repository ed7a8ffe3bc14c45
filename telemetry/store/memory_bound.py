"""The memory of all queries of users together.

The engine's own limit for all queries would stop whichever query asks next, an insert or a small
query too. This bound ends the query with the most memory, and does so below that limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from millrace.telemetry.store.reading import QueryError

_LOOK_EVERY_S = 0.1
# While all queries have more than a quarter of the limit.
_LOOK_SOON_S = 0.02
_MEMORY_LIMIT_EXCEEDED = 241
_MIB = 1024 * 1024


class MemoryBound:
    """Looks at the memory of queries while there are some, in a thread of its own.

    ``measure`` answers the bytes of each query by its id, ``kill`` ends one. Queries are ended from
    half of the limit on: they grow meanwhile.
    """

    def __init__(
        self,
        limit_bytes: int,
        measure: Callable[[], Mapping[str, int]],
        kill: Callable[[str], None],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._most_bytes = limit_bytes // 2
        self._pause_s = _LOOK_EVERY_S
        self._measure = measure
        self._kill = kill
        self._ended: dict[str, QueryError] = {}
        self._lock = threading.Condition()
        self._num_running = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="store-memory", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """A query begins."""
        with self._lock:
            self._num_running += 1
            self._lock.notify()

    def leave(self, query_id: str) -> QueryError | None:
        """A query is over; the error if this bound ended it."""
        with self._lock:
            self._num_running -= 1
            return self._ended.pop(query_id, None)

    def close(self) -> None:
        """Look no more."""
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closed or self._num_running)
                if not self._is_closed:
                    self._lock.wait_for(lambda: self._is_closed, timeout=self._pause_s)
                if self._is_closed:
                    return
            self.look()

    def look(self) -> None:
        """End the query with the most memory if all have too much. The memory of a query that was
        ended comes back in a moment, and does not count unless all exceed the limit itself."""
        taken = self._measure()
        with self._lock:
            others = {each: taken[each] for each in taken if each not in self._ended}
            all_bytes, others_bytes = sum(taken.values()), sum(others.values())
            is_soon = 4 * all_bytes > self._limit_bytes
            self._pause_s = _LOOK_SOON_S if is_soon else _LOOK_EVERY_S
            if not others or (others_bytes <= self._most_bytes and all_bytes <= self._limit_bytes):
                return
            query_id = max(others, key=lambda each: others[each])
            self._ended[query_id] = QueryError.refusing(
                _MEMORY_LIMIT_EXCEEDED,
                f"Memory limit of all queries exceeded: they use {all_bytes // _MIB} MiB, maximum: "
                f"{self._most_bytes // _MIB} MiB. This query used the most of it, "
                f"{taken[query_id] // _MIB} MiB: read fewer rows or columns, or ask again later. "
                "(MEMORY_LIMIT_EXCEEDED)",
            )
        self._kill(query_id)
