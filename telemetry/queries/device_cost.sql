-- Cost of devices while busy and while idle, by currency, in steps.
-- Money is for plotting: idle_cost has the exact amounts. A short step that is not over yet is left
-- out; steps of a minute or more are of whole minutes. An idle worker reports twice a minute, so its
-- last half minute may be missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param step_s: the length of a step (default 60)
WITH
    {{worker_steps}},
    costs AS
    (
        SELECT
            toInt64(toUnixTimestamp(minute)) AS at_s,
            currency,
            toFloat64(device_per_hour) * w.busy_us / 3.6e9 AS busy_cost,
            toFloat64(device_per_hour) * w.idle_us / 3.6e9 AS idle_cost
        FROM workers_by_minute AS w FINAL
        WHERE {{workers_in_range}}
          AND step_s >= 60
        UNION ALL
        SELECT
            toInt64(toUnixTimestamp(sampled_at)) - (num_pieces > 1) - piece * step_s,
            currency,
            toFloat64(device_per_hour) * s.busy_us / 3.6e9,
            toFloat64(device_per_hour) * (s.period_ms / num_pieces * s.num_devices * 1000 - s.busy_us) / 3.6e9
        FROM
        (
            {{worker_pieces}}
        ) AS s
    )
SELECT
    toDateTime(intDiv(at_s, step_s) * step_s, 'UTC') AS t,
    currency,
    sum(c.busy_cost) AS busy_cost,
    greatest(sum(c.idle_cost), 0) AS idle_cost
FROM costs AS c
WHERE at_s >= begin_s AND at_s < end_s
GROUP BY t, currency
ORDER BY t, currency
