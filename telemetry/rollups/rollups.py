"""Usage and workers' work by the minute, computed from stored rows, never added up from inserts.

A minute that a stored batch touched is computed again, whole, within an interval. What a crash
leaves behind is found at the start: minutes whose rows are not those that were counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from millrace.runtime.clock import Clock
from millrace.runtime.tasks import wait_or_sleep
from millrace.telemetry.rollups.statements import LAST_VERSION, USAGE, WORKERS, Rollup
from millrace.telemetry.store.store import Store

logger = logging.getLogger(__name__)

_NS_PER_MINUTE = 60 * 1_000_000_000
_MINUTES_PER_DAY = 24 * 60
_MINUTES_PER_HOUR = 60
_MOST_ROWS = 100_000
# What came late, after an outage, or was replaced by a record of another minute, is found so.
_RECONCILE_INTERVAL_S = 600.0
_RECONCILE_DAYS = 3
# Of the time, the part that computing minutes may take while rows pour in.
_MOST_SHARE = 0.25
# A round costs about the same for one row as for a thousand: rounds rest until they take this part
# of the time, but at most so many intervals.
_SPARSE_SHARE = 0.02
_SPARSE_INTERVALS = 5


class Rollups:
    """Keeps ``usage_by_minute`` equal to the requests that are stored, and ``workers_by_minute`` to
    the samples.

    ``touched`` and ``sampled`` may be called at any time; ``run`` does the work, ``stop`` ends it
    once every minute that was touched by then is computed, if the store takes it.
    """

    def __init__(self, store: Store, clock: Clock, interval_s: float) -> None:
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._dirty: set[int] = set()
        self._is_sampled = True
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._version = 0
        self._settled_s: float | None = None
        self.num_computed = 0

    def touched(self, done_ns: Iterable[int]) -> None:
        """Requests that ended at these times, UTC epoch in ns, have been stored."""
        self._dirty.update(each // _NS_PER_MINUTE for each in done_ns)
        if self._dirty:
            self._wake.set()

    def sampled(self) -> None:
        """Samples of workers have been stored."""
        self._is_sampled = True
        self._wake.set()

    @property
    def age_s(self) -> float | None:
        """For how long what is stored has not been computed; None before the first round without a
        failure, 0 while nothing is to be computed."""
        if self._settled_s is None:
            return None
        return self._clock.monotonic() - self._settled_s if self._is_behind else 0.0

    @property
    def _is_behind(self) -> bool:
        return self._is_sampled or bool(self._dirty)

    def stop(self) -> None:
        """Have ``run`` return after one more round."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Reconcile, then compute what was touched, at most every ``interval_s``, later while that
        takes long, and not at all while nothing is stored. Raises StoreUnavailableError: nothing
        that was touched is forgotten by it."""
        await self.reconcile()
        reconciled_s = self._clock.monotonic()
        while not self._stopping.is_set():
            started_s = self._clock.monotonic()
            if started_s - reconciled_s >= _RECONCILE_INTERVAL_S:
                await self.reconcile(_RECONCILE_DAYS)
                reconciled_s = self._clock.monotonic()
            await self.settle()
            took_s = self._clock.monotonic() - started_s
            await wait_or_sleep(self._stopping, self._clock, self.rest_s(took_s))
            if not self._is_behind and not self._stopping.is_set():
                self._wake.clear()
                due_s = reconciled_s + _RECONCILE_INTERVAL_S
                await wait_or_sleep(self._wake, self._clock, due_s - self._clock.monotonic())
        await self.settle()

    def rest_s(self, took_s: float) -> float:
        """How long nothing is computed after a round that took ``took_s``."""
        return max(
            self._interval_s,
            took_s * (1 / _MOST_SHARE - 1),
            min(took_s * (1 / _SPARSE_SHARE - 1), _SPARSE_INTERVALS * self._interval_s),
        )

    async def settle(self) -> None:
        """Compute the minutes that requests touched so far, and of the last hour those whose
        samples are not those that were counted. Raises StoreUnavailableError."""
        now = self._clock.now_ns() // _NS_PER_MINUTE
        # Of minutes before these, rows may be gone that were counted.
        first = now - USAGE.kept_days * _MINUTES_PER_DAY
        minutes, self._dirty = {minute for minute in self._dirty if minute >= first}, set()
        try:
            for begin, end in _spans(sorted(minutes)):
                await self._correct(USAGE, begin, end)
                minutes.difference_update(range(begin, end))
        finally:
            self._dirty |= minutes
        if self._is_sampled:
            self._is_sampled = False
            try:
                await self._correct(WORKERS, now - _MINUTES_PER_HOUR, now + _MINUTES_PER_HOUR)
            except BaseException:
                self._is_sampled = True
                raise
        self._settled_s = self._clock.monotonic()

    async def reconcile(self, days: int | None = None) -> int:
        """Compute all minutes, or those of the last ``days``, that do not count the rows which are
        there; how many those were. Raises StoreUnavailableError.

        Day by day, the latest first: in between others write.
        """
        ((version,),) = await self._store.rows(LAST_VERSION)
        self._version = max(self._version, int(version))
        today = self._clock.now_ns() // (_NS_PER_MINUTE * _MINUTES_PER_DAY)
        num_differing = 0
        for rollup in (USAGE, WORKERS):
            first_day = today - min(rollup.kept_days, days or rollup.kept_days)
            for (day,) in await self._store.rows(rollup.days, {"first_day": first_day}):
                begin = int(day) * _MINUTES_PER_DAY
                num_differing += await self._correct(rollup, begin, begin + _MINUTES_PER_DAY)
        if num_differing:
            logger.info("computed minutes again", extra={"minutes": num_differing})
        return num_differing

    async def _correct(self, rollup: Rollup, begin: int, end: int) -> int:
        """Compute what differs from the minute ``begin`` up to ``end``; how many minutes."""
        rows = await self._store.rows(rollup.differing, _range(begin, end))
        for minutes in _batches([(int(s) // 60, int(count)) for s, count in rows]):
            await self._compute(rollup, minutes)
        return len(rows)

    async def _compute(self, rollup: Rollup, minutes: list[int]) -> None:
        seconds = ",".join(str(minute * 60) for minute in minutes)
        parameters = {
            **_range(minutes[0], minutes[-1] + 1),
            "minutes": f"[{seconds}]",
            "version": self._version + 1,
        }
        await self._store.command(rollup.compute, parameters)
        self.num_computed += len(minutes)


def _spans(minutes: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of at most a day, which hold these minutes and few others."""
    first = 0
    for i, minute in enumerate(minutes):
        is_far = i > 0 and minute - minutes[i - 1] > _MINUTES_PER_HOUR
        if is_far or minute - minutes[first] >= _MINUTES_PER_DAY:
            yield minutes[first], minutes[i - 1] + 1
            first = i
    if minutes:
        yield minutes[first], minutes[-1] + 1


def _batches(minutes: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Minutes, given with their numbers of rows, as many together as memory takes well."""
    batch: list[int] = []
    num_rows = 0
    for minute, count in minutes:
        if batch and num_rows + count > _MOST_ROWS:
            yield batch
            batch, num_rows = [], 0
        batch.append(minute)
        num_rows += count
    if batch:
        yield batch


def _range(begin: int, end: int) -> dict[str, str | int | float]:
    """As the parameters of a statement: from one minute up to another, which is not included."""
    return {"begin_us": begin * 60_000_000, "end_us": end * 60_000_000}
