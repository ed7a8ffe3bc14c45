"""Statements of the tables by the minute.

Each rollup has three. ``compute`` counts the rows of ``minutes`` (Unix times, between ``begin_us``
and ``end_us``) as they are now. Existing groups come along empty, so that a group whose last row
moved to another minute by a later record is marked as deleted. ``differing`` returns the minutes of
a range that do not match their rows, with the number of rows. ``days`` returns the days with rows
or minutes, since the epoch, the latest first.
"""

from __future__ import annotations

from string import Template

import msgspec

# A version is a time in ns, or larger if the clock went back.
LAST_VERSION = """
SELECT greatest(
    (SELECT max(version) FROM usage_by_minute), (SELECT max(version) FROM workers_by_minute)
)
"""


class Rollup(msgspec.Struct, frozen=True, kw_only=True):
    """Table of rows with its table by the minute. Minutes older than ``kept_days`` stay as they
    are: their rows may be gone."""

    name: str
    kept_days: int
    compute: str
    differing: str
    days: str


_ROWS_OF_RANGE = """\
$at >= fromUnixTimestamp64Micro({begin_us:Int64}, 'UTC')
      AND $at < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC')"""
_MINUTES_OF_RANGE = """\
minute >= toDateTime(intDiv({begin_us:Int64}, 1000000), 'UTC')
      AND minute < toDateTime(intDiv({end_us:Int64}, 1000000), 'UTC')"""
_DIFFERING = """
SELECT toUnixTimestamp(minute), sum(num_rows)
FROM
(
    SELECT
        toStartOfMinute($at) AS minute,
        groupBitXor($fingerprint) AS found,
        0 AS counted,
        count() AS num_rows
    FROM $rows FINAL
    WHERE $rows_of_range
    GROUP BY minute
    UNION ALL
    SELECT minute, 0, groupBitXor(fingerprint), 0
    FROM $name FINAL
    WHERE $minutes_of_range
    GROUP BY minute
)
GROUP BY minute
HAVING sum(found) != sum(counted)
ORDER BY minute
"""
_DAYS = """
SELECT DISTINCT day
FROM
(
    SELECT intDiv(toUnixTimestamp64Micro($at), 86400000000) AS day FROM $rows
    UNION ALL
    SELECT intDiv(toUnixTimestamp(minute), 86400) FROM $name
)
WHERE day >= {first_day:Int64}
ORDER BY day DESC
"""


def _rollup(
    *, name: str, kept_days: int, rows: str, at: str, fingerprint: str, compute: str
) -> Rollup:
    """Build a rollup.

    Args:
        rows: The counted table.
        at: Its time column.
        fingerprint: An expression that distinguishes a row and its place in the outbox from every
            other row.
    """
    parts = {
        "name": name,
        "rows": rows,
        "at": at,
        "fingerprint": fingerprint,
        "rows_of_range": Template(_ROWS_OF_RANGE).substitute(at=at),
        "minutes_of_range": _MINUTES_OF_RANGE,
    }
    compute, differing, days = (
        Template(one).substitute(parts) for one in (compute, _DIFFERING, _DAYS)
    )
    return Rollup(name=name, kept_days=kept_days, compute=compute, differing=differing, days=days)


USAGE = _rollup(
    name="usage_by_minute",
    kept_days=398,
    rows="requests",
    at="done_at",
    fingerprint="cityHash64(request_id, outbox_sequence)",
    compute="""
INSERT INTO $name
SELECT
    minute,
    tenant, user, model, adapter, source, tier, currency, price_version, key_id,
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
    sumOrNull(energy_j),
    count(energy_j),
    sumIf(prompt_tokens - cached_tokens + completion_tokens, isNotNull(energy_j)),
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
        adapter, source, tier, currency, price_version, key_id,
        1 AS counted,
        status, prompt_tokens, cached_tokens, completion_tokens,
        cost, device_us, device_cost, energy_j, num_preemptions,
        length(lives) AS num_moves,
        queue_ms, ttft_ms,
        tpot_ms,
        toUInt32(greatest(completion_tokens, 1) - 1) AS num_gaps,
        if(status = 'done', total_ms, NULL) AS answered_ms,
        $fingerprint AS hash
    FROM $rows FINAL
    WHERE $rows_of_range
      AND toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
    UNION ALL
    SELECT
        minute, tenant, user, model, adapter, source, tier, currency, price_version, key_id,
        0, '', 0, 0, 0, toDecimal128(0, 12), 0, toDecimal128(0, 12), NULL, 0, 0,
        NULL, NULL, NULL, 0, NULL, 0
    FROM $name FINAL
    WHERE $minutes_of_range
      AND toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
)
GROUP BY minute, tenant, user, model, adapter, source, tier, currency, price_version, key_id
""",
)

WORKERS = _rollup(
    name="workers_by_minute",
    kept_days=12,
    rows="worker_samples",
    at="sampled_at",
    fingerprint="cityHash64(worker, sampled_at, outbox_sequence)",
    compute="""
INSERT INTO $name
SELECT
    minute, model, worker, currency, device_per_hour,
    max(s.name),
    max(s.device_name),
    sum(counted) AS num_samples,
    sum(s.period_ms),
    sum(s.busy_us),
    sum(s.charged_us),
    toUInt64(greatest(sum(s.period_ms * s.num_devices) * 1000 - sum(s.busy_us), 0)),
    sumOrNull(s.energy_j),
    sumOrNull(s.charged_j),
    sum(s.num_steps),
    ifNull(sum(s.step_ms_mean * s.num_steps), 0),
    sum(s.prefill_tokens),
    sum(s.decode_tokens),
    sum(s.num_preemptions),
    sum(s.prefix_query_tokens),
    sum(s.prefix_hit_tokens),
    sum(s.num_running * s.period_ms),
    sum(s.num_waiting * s.period_ms),
    sum(s.queue_depth * s.period_ms),
    max(s.queue_depth),
    ifNull(sum(s.num_blocks * s.period_ms), 0),
    ifNull(sum(s.used_blocks * s.period_ms), 0),
    sumOrNull(s.device_share * s.period_ms),
    maxOrNull(s.device_memory_bytes),
    maxOrNull(s.device_memory_total_bytes),
    groupBitXor(s.hash),
    greatest(toUInt64(toUnixTimestamp64Nano(now64(9))), {version:UInt64}),
    num_samples = 0
FROM
(
    SELECT
        toStartOfMinute(sampled_at) AS minute,
        model, worker, currency, device_per_hour, name, device_name,
        1 AS counted,
        period_ms, busy_us, charged_us, energy_j, charged_j,
        num_steps, step_ms_mean, prefill_tokens, decode_tokens, num_preemptions,
        prefix_query_tokens, prefix_hit_tokens, num_running, num_waiting, queue_depth, num_blocks,
        greatest(num_blocks, num_free_blocks) - num_free_blocks AS used_blocks,
        device_share, device_memory_bytes, device_memory_total_bytes, num_devices,
        $fingerprint AS hash
    FROM $rows FINAL
    WHERE $rows_of_range
      AND toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
    UNION ALL
    SELECT
        minute, model, worker, currency, device_per_hour, '', '',
        0, 0, 0, 0, NULL, NULL, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0
    FROM $name FINAL
    WHERE $minutes_of_range
      AND toUInt32(toUnixTimestamp(minute)) IN {minutes:Array(UInt32)}
) AS s
GROUP BY minute, model, worker, currency, device_per_hour
""",
)
