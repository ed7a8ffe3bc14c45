"""Usage and workers' activity by the minute, computed from stored rows, never added up from
inserts.

A minute touched by a stored batch is recomputed completely within an interval. After a crash, the
start finds minutes whose rows differ from the counted rows.
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
# Finds records that came late after an outage or moved to another minute.
_RECONCILE_INTERVAL_S = 600.0
_RECONCILE_DAYS = 3
# Largest share of the time for computing minutes while many rows arrive.
_MOST_SHARE = 0.25
# A round costs about the same for one row as for a thousand: rounds are spaced so that they take
# this share of the time, but by at most so many intervals.
_SPARSE_SHARE = 0.02
_SPARSE_INTERVALS = 5


class Rollups:
    """Updater of ``usage_by_minute`` from the stored requests, and of ``workers_by_minute`` from
    the samples.

    ``touched`` and ``sampled`` may be called at any time. ``run`` does the work; ``stop`` ends it
    after all minutes touched by then are computed, if the store accepts them.
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
        """Note that requests which ended at these times, UTC epoch in ns, were stored."""
        self._dirty.update(each // _NS_PER_MINUTE for each in done_ns)
        if self._dirty:
            self._wake.set()

    def sampled(self) -> None:
        """Note that samples of workers were stored."""
        self._is_sampled = True
        self._wake.set()

    @property
    def age_s(self) -> float | None:
        """Seconds since all stored rows were last computed; None before the first successful round,
        0 if all are computed."""
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
        """Reconcile, then compute touched minutes.

        Rounds run at most every ``interval_s``, less often while they take long, and never while
        nothing is stored. Raises StoreUnavailableError; touched minutes are then kept for the next
        round.
        """
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
        """Return the pause after a round that took ``took_s``."""
        return max(
            self._interval_s,
            took_s * (1 / _MOST_SHARE - 1),
            min(took_s * (1 / _SPARSE_SHARE - 1), _SPARSE_INTERVALS * self._interval_s),
        )

    async def settle(self) -> None:
        """Compute the minutes touched by requests so far, and those of the last hour whose samples
        differ from the counted samples.

        Raises StoreUnavailableError.
        """
        now = self._clock.now_ns() // _NS_PER_MINUTE
        # Older minutes may have lost rows that were counted.
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
        """Compute all minutes, or those of the last ``days``, that do not match their rows; return
        their number.

        Works day by day, the latest first, so that other writers get a turn. Raises
        StoreUnavailableError.
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
        """Recompute differing minutes from ``begin`` up to ``end``; return their number."""
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
    """Return ranges of at most a day that hold these minutes and few others."""
    first = 0
    for i, minute in enumerate(minutes):
        is_far = i > 0 and minute - minutes[i - 1] > _MINUTES_PER_HOUR
        if is_far or minute - minutes[first] >= _MINUTES_PER_DAY:
            yield minutes[first], minutes[i - 1] + 1
            first = i
    if minutes:
        yield minutes[first], minutes[-1] + 1


def _batches(minutes: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Group minutes, given with their numbers of rows, so that each group fits in memory."""
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
    """Return a statement's parameters for the minutes from ``begin`` up to, but not including,
    ``end``."""
    return {"begin_us": begin * 60_000_000, "end_us": end * 60_000_000}
