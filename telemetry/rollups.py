"""Usage by the minute, computed from the requests that are stored, never added up from inserts.

A minute that a stored batch touched is computed again, whole, within an interval. What a crash
leaves behind is found at the start: minutes whose rows are not those that were counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from bus.clock import Clock
from telemetry.store import Store

logger = logging.getLogger(__name__)

_NS_PER_MINUTE = 60 * 1_000_000_000
_MINUTES_PER_DAY = 24 * 60
# A row's minute is a DateTime, which ends in 2106; a request that ended later did not.
_LAST_MINUTE = (1 << 32) // 60 - 1
# Rows are kept for 400 days. Of the last of them some may be gone: its minutes stay as they are.
_KEPT_DAYS = 398
_MOST_AT_ONCE = 500
# Of the time, the part that computing minutes may take of it while rows pour in.
_MOST_SHARE = 0.25

# The groups that are there already come along with nothing in them: one whose last request has
# moved to another minute, by a later record, is counted as empty.
_COMPUTE = """
INSERT INTO usage_by_minute
SELECT
    minute,
    tenant, user, model, adapter, source, tier, currency, price_version,
    sum(counted) AS num_requests,
    countIf(status = 'done'),
    countIf(status = 'cancelled'),
    countIf(status = 'expired'),
    countIf(status = 'shed'),
    countIf(status = 'failed'),
    sum(prompt_tokens),
    sum(cached_tokens),
    sum(completion_tokens),
    sum(cost),
    sum(device_us),
    sum(device_cost),
    sum(num_preemptions),
    sum(num_moves),
    quantilesTDigestState(0.5, 0.9, 0.95, 0.99)(queue_ms),
    quantilesTDigestState(0.5, 0.9, 0.95, 0.99)(ttft_ms),
    quantilesTDigestState(0.5, 0.9, 0.95, 0.99)(tpot_ms),
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(tpot_ms, num_gaps),
    quantilesTDigestState(0.5, 0.9, 0.95, 0.99)(answered_ms),
    groupBitXor(hash),
    greatest(toUInt64(toUnixTimestamp64Nano(now64(9))), {version:UInt64}),
    num_requests = 0
FROM
(
    SELECT
        toStartOfMinute(done_at) AS minute,
        tenant, user,
        if(model_served = '', model_requested, model_served) AS model,
        adapter, source, tier, currency, price_version,
        1 AS counted,
        status, prompt_tokens, cached_tokens, completion_tokens,
        cost, device_us, device_cost, num_preemptions,
        length(lives) AS num_moves,
        queue_ms, ttft_ms,
        tpot_us / 1000 AS tpot_ms,
        toUInt32(greatest(completion_tokens, 1) - 1) AS num_gaps,
        if(status = 'done', total_ms, NULL) AS answered_ms,
        cityHash64(request_id, outbox_sequence) AS hash
    FROM requests FINAL
    WHERE done_at >= fromUnixTimestamp64Micro({begin_us:Int64}, 'UTC')
      AND done_at < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC')
      AND toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
    UNION ALL
    SELECT
        minute, tenant, user, model, adapter, source, tier, currency, price_version,
        0, '', 0, 0, 0, toDecimal128(0, 12), 0, toDecimal128(0, 12), 0, 0,
        NULL, NULL, NULL, 0, NULL, 0
    FROM usage_by_minute FINAL
    WHERE toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
)
GROUP BY minute, tenant, user, model, adapter, source, tier, currency, price_version
"""

_DIFFERING = """
SELECT toUnixTimestamp(minute)
FROM
(
    SELECT toStartOfMinute(done_at) AS minute, groupBitXor(cityHash64(request_id, outbox_sequence)) AS found, 0 AS counted
    FROM requests FINAL
    WHERE done_at >= fromUnixTimestamp64Micro({begin_us:Int64}, 'UTC')
      AND done_at < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC')
    GROUP BY minute
    UNION ALL
    SELECT minute, 0, groupBitXor(fingerprint)
    FROM usage_by_minute FINAL
    WHERE minute >= toDateTime(intDiv({begin_us:Int64}, 1000000), 'UTC')
      AND minute < toDateTime(intDiv({end_us:Int64}, 1000000), 'UTC')
    GROUP BY minute
)
GROUP BY minute
HAVING sum(found) != sum(counted)
ORDER BY minute
"""

_EXTENT = """
SELECT
    (SELECT intDiv(toUnixTimestamp(least(min(done_at), now64(6))), 86400) FROM requests),
    (SELECT intDiv(toUnixTimestamp(max(done_at)), 86400) FROM requests),
    (SELECT max(version) FROM usage_by_minute)
"""


class Rollups:
    """Keeps ``usage_by_minute`` equal to the requests that are stored.

    ``touched`` may be called at any time; ``run`` does the work, ``stop`` ends it once every
    minute that was touched by then is computed, if the store takes it.
    """

    def __init__(self, store: Store, clock: Clock, interval_s: float) -> None:
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._dirty: set[int] = set()
        self._stopping = asyncio.Event()
        self._last_version = 0
        self.num_computed = 0

    def touched(self, done_ns: Iterable[int]) -> None:
        """Requests that ended at these times, UTC epoch in ns, have been stored."""
        self._dirty.update(min(each // _NS_PER_MINUTE, _LAST_MINUTE) for each in done_ns)

    def stop(self) -> None:
        """Have ``run`` return after one more round."""
        self._stopping.set()

    async def run(self) -> None:
        """Reconcile once, then compute what was touched, every ``interval_s``; later while that
        takes long. Raises StoreUnavailableError: nothing that was touched is forgotten by it."""
        await self.reconcile()
        while not self._stopping.is_set():
            started_s = self._clock.monotonic()
            await self.settle()
            took_s = self._clock.monotonic() - started_s
            await self._rest(max(self._interval_s, took_s * (1 / _MOST_SHARE - 1)))
        await self.settle()

    async def settle(self) -> None:
        """Compute the minutes that were touched so far. Raises StoreUnavailableError."""
        minutes, self._dirty = self._dirty, set()
        try:
            for some in _chunks(sorted(minutes)):
                await self._compute(some)
                minutes.difference_update(some)
        finally:
            self._dirty |= minutes

    async def reconcile(self) -> int:
        """Compute all minutes that do not count the rows which are there; how many those were.

        Raises StoreUnavailableError. Day by day, the latest first: between two days others write.
        """
        first_day, last_day = await self._days()
        num_differing = 0
        for day in range(last_day, first_day - 1, -1):
            begin = day * _MINUTES_PER_DAY
            parameters = _range(begin, begin + _MINUTES_PER_DAY)
            rows = await self._store.rows(_DIFFERING, parameters)
            differing = [int(seconds) // 60 for (seconds,) in rows]
            for some in _chunks(differing):
                await self._compute(some)
            num_differing += len(differing)
        if num_differing:
            logger.info("computed usage again", extra={"minutes": num_differing})
        return num_differing

    async def _days(self) -> tuple[int, int]:
        """The first and the last day, since the epoch, that has rows which will not expire soon."""
        first_kept = self._clock.now_ns() // (_NS_PER_MINUTE * _MINUTES_PER_DAY) - _KEPT_DAYS
        ((first, last, version),) = await self._store.rows(_EXTENT)
        self._last_version = max(self._last_version, int(version))
        return max(int(first), first_kept), int(last)

    async def _compute(self, minutes: list[int]) -> None:
        seconds = ",".join(str(minute * 60) for minute in minutes)
        await self._store.command(
            _COMPUTE,
            {
                **_range(minutes[0], minutes[-1] + 1),
                "minutes": f"[{seconds}]",
                "version": self._last_version + 1,
            },
        )
        self.num_computed += len(minutes)

    async def _rest(self, seconds: float) -> None:
        """Sleep, unless told to stop."""
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((sleeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            stopping.cancel()


def _chunks(minutes: list[int]) -> Iterator[list[int]]:
    """In order, each with so many minutes and over such a time that one statement takes it well."""
    first = 0
    for i, minute in enumerate(minutes):
        if minute - minutes[first] >= _MINUTES_PER_DAY or i - first >= _MOST_AT_ONCE:
            yield minutes[first:i]
            first = i
    if minutes:
        yield minutes[first:]


def _range(begin: int, end: int) -> dict[str, str | int | float]:
    """As the parameters of a statement: from one minute up to another, which is not included."""
    return {"begin_us": begin * 60_000_000, "end_us": end * 60_000_000}
