-- State of the alerts of deploy/prometheus/alerts.yml, as far as rows show it.
-- For each alert and model (or worker) of the last twelve hours: its current value, whether it exceeds
-- the bound, and since when without a break, as a Unix time, at most six hours ago. Windows and bounds
-- are the alerts' own; minutes are whole except the last. A late first token is measured at the
-- client, as in the gateways' metrics.
-- param ttft_ms: objective for the time to first token, in ms (default 1000)
-- param target: share of first tokens that should arrive within it (default 0.95)
WITH
    720 AS num_minutes,
    intDiv(toInt64(toUnixTimestamp(now())), 60) - num_minutes + 1 AS first_minute,
    toDateTime(60 * first_minute, 'UTC') AS earliest,
    round(1 - {target:Float64}, 6) AS budget,
    -- Alert, its two windows in minutes, its bound, and the kind of its value: per second, a share, or
    -- 0: neither.
    [
        ('MillraceFirstTokensLate', 60, 5, round(14.4 * budget, 6), 'share'),
        ('MillraceFirstTokensOftenLate', 360, 30, round(6 * budget, 6), 'share'),
        ('MillraceStreamsStall', 10, 10, 0.05, 'share'),
        ('MillraceGenerationsFail', 5, 5, 0.02, 'share'),
        ('MillraceShedding', 5, 5, 0.1, 'per_s'),
        ('MillracePoison', 30, 30, 0., 'count')
    ] AS alerts
SELECT
    alert,
    subject,
    value,
    bound,
    is_over,
    if(is_over, since_s, NULL) AS since_s
FROM
(
    SELECT
        alert,
        subject,
        bound,
        arrayMap(i -> hits[i] - if(i > long_min, hits[i - long_min], 0), range(1, num_minutes + 1)) AS long_hits,
        arrayMap(i -> hits[i] - if(i > short_min, hits[i - short_min], 0), range(1, num_minutes + 1)) AS short_hits,
        arrayMap(i -> multiIf(kind = 'count', 1., kind = 'per_s', 60. * long_min, all_until[i] - if(i > long_min, all_until[i - long_min], 0)), range(1, num_minutes + 1)) AS long_of,
        arrayMap(i -> multiIf(kind = 'count', 1., kind = 'per_s', 60. * short_min, all_until[i] - if(i > short_min, all_until[i - short_min], 0)), range(1, num_minutes + 1)) AS short_of,
        arrayMap((a, b, c, d) -> a > bound * b AND c > bound * d, long_hits, long_of, short_hits, short_of) AS over,
        if(long_of[num_minutes] = 0, NULL, long_hits[num_minutes] / long_of[num_minutes]) AS value,
        over[num_minutes] AS is_over,
        60 * (first_minute + greatest(arrayLastIndex(is_one_over -> NOT is_one_over, over), num_minutes - 360)) AS since_s
    FROM
    (
        SELECT
            one.1 AS alert,
            model AS subject,
            any(one.4) AS bound,
            any(one.5) AS kind,
            any(one.2) AS long_min,
            any(one.3) AS short_min,
            arrayCumSum(groupArrayInsertAt(0., 720)(toFloat64(multiIf(
                startsWith(one.1, 'MillraceFirst'), s.late, one.1 = 'MillraceStreamsStall', s.stalls,
                one.1 = 'MillraceGenerationsFail', s.failed, one.1 = 'MillraceShedding', s.shed, s.poison)),
                toUInt32(minute - first_minute))) AS hits,
            arrayCumSum(groupArrayInsertAt(0., 720)(toFloat64(multiIf(
                startsWith(one.1, 'MillraceFirst'), s.first_tokens, one.1 = 'MillraceStreamsStall', s.deliveries, s.requests)),
                toUInt32(minute - first_minute))) AS all_until
        FROM
        (
            SELECT
                minute,
                model,
                sum(p.late) AS late,
                sum(p.first_tokens) AS first_tokens,
                sum(p.stalls) AS stalls,
                sum(p.deliveries) AS deliveries,
                sum(p.requests) AS requests,
                sum(p.failed) AS failed,
                sum(p.shed) AS shed,
                sum(p.poison) AS poison
            FROM
            (
                SELECT
                    intDiv(toInt64(toUnixTimestamp(done_at)), 60) AS minute,
                    model,
                    d.first_byte_ms > {ttft_ms:Float64} AS late,
                    d.first_byte_ms > 0 AS first_tokens,
                    d.num_stalls AS stalls,
                    1 AS deliveries,
                    0 AS requests,
                    0 AS failed,
                    0 AS shed,
                    0 AS poison
                FROM deliveries AS d FINAL
                WHERE done_at >= earliest AND done_at < now64(6)
                UNION ALL
                SELECT intDiv(toInt64(toUnixTimestamp(minute)), 60), model, 0, 0, 0, 0, u.requests, u.failed + u.expired, u.shed, 0
                FROM usage_by_minute AS u FINAL
                WHERE minute >= earliest AND minute <= now()
                UNION ALL
                SELECT
                    intDiv(toInt64(toUnixTimestamp(done_at)), 60),
                    if(model_served = '', model_requested, model_served), 0, 0, 0, 0, 0, 0, 0, 1
                FROM requests FINAL
                WHERE done_at >= earliest AND done_at < now64(6) AND error_code = 'poison'
            ) AS p
            GROUP BY minute, model
        ) AS s
        ARRAY JOIN alerts AS one
        GROUP BY alert, subject
    )
)
UNION ALL
SELECT
    'MillraceKvCacheFull',
    name,
    argMax(used, sampled_at),
    0.95,
    argMax(used, sampled_at) > 0.95,
    if(
        argMax(used, sampled_at) > 0.95,
        toInt64(toUnixTimestamp(greatest(min(sampled_at), maxIf(sampled_at, used <= 0.95)))),
        NULL
    )
FROM
(
    -- An engine that reports no blocks has no cache that could be full.
    SELECT name, sampled_at, (num_blocks - num_free_blocks) / num_blocks AS used
    FROM worker_samples FINAL
    WHERE sampled_at >= now64(6) - toIntervalMinute(30) AND num_blocks > 0
)
GROUP BY name
HAVING max(sampled_at) > now64(6) - toIntervalSecond(45)
