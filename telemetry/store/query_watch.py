"""Watch of running user queries: their total memory, and the processor time of long ones.

The engine's own total limit would stop whichever query allocates next, even an insert or a small
query. This watch ends the query with the most memory, below that limit. Threads of a query that
runs for 0.3 s get a higher niceness, so that inserts, the operations page and short queries run
first. They end with the query, since the engine keeps no idle threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from millrace.telemetry.store.reading import QueryError

_LOOK_EVERY_S = 0.1
# Interval while the queries together use more than a quarter of the limit.
_LOOK_SOON_S = 0.02
_MEMORY_LIMIT_EXCEEDED = 241
_MIB = 1024 * 1024


# Seconds after which a query counts as long, and the increase of its threads' niceness.
_LONG_S = 0.3
_LONG_NICE = 14


class RunningQuery(msgspec.Struct, frozen=True, array_like=True):
    """Running query, as the engine reports it."""

    tag: str
    memory_bytes: int
    elapsed_s: float
    thread_ids: tuple[int, ...]


class QueryWatch:
    """Watcher of queries in its own thread while any run.

    ``measure`` returns the running queries. ``kill`` ends one query and returns whether it could; a
    failed kill is retried. Queries are ended from half of the limit on, since they grow meanwhile.
    """

    def __init__(
        self,
        limit_bytes: int,
        measure: Callable[[], Sequence[RunningQuery]],
        kill: Callable[[str], bool],
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
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """Note that a query begins."""
        with self._lock:
            self._num_running += 1
            self._lock.notify()

    def leave(self, tag: str) -> QueryError | None:
        """Note that a query is over; return the error if this watch ended it."""
        with self._lock:
            self._num_running -= 1
            error = self._ended.pop(tag, None)
            if not self._num_running:
                # Forget queries that finished before they were ended.
                self._ended.clear()
            return error

    def close(self) -> None:
        """Stop watching."""
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
            running = self._measure()
            self.bound(running)
            _yield_to_others(running)

    def bound(self, running: Sequence[RunningQuery]) -> None:
        """End the query with the most memory if all together use too much.

        The memory of an ended query is released in a moment, and does not count unless the total
        exceeds the limit itself.
        """
        taken = {query.tag: query.memory_bytes for query in running}
        with self._lock:
            others = {each: taken[each] for each in taken if each not in self._ended}
            all_bytes, others_bytes = sum(taken.values()), sum(others.values())
            is_soon = 4 * all_bytes > self._limit_bytes
            self._pause_s = _LOOK_SOON_S if is_soon else _LOOK_EVERY_S
            if not others or (others_bytes <= self._most_bytes and all_bytes <= self._limit_bytes):
                return
            tag = max(others, key=lambda each: others[each])
            self._ended[tag] = QueryError.refusing(
                _MEMORY_LIMIT_EXCEEDED,
                f"Memory limit of all queries exceeded: they use {all_bytes // _MIB} MiB, maximum: "
                f"{self._most_bytes // _MIB} MiB. This query used the most of it, "
                f"{taken[tag] // _MIB} MiB: read fewer rows or columns, or ask again later. "
                "(MEMORY_LIMIT_EXCEEDED)",
            )
        if not self._kill(tag):
            with self._lock:
                self._ended.pop(tag, None)


def _yield_to_others(running: Sequence[RunningQuery]) -> None:
    """Lower the priority of long queries' threads."""
    if sys.platform != "linux":
        return
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _LONG_NICE)
    for query in running:
        if query.elapsed_s > _LONG_S:
            for thread_id in query.thread_ids:
                # The thread may have ended meanwhile.
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
