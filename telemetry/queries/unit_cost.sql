-- Cost of a million computed tokens, by model, in four ways.
-- The tenants' price, the device's busy time, the device's total time (idle time included), and the
-- lowest possible cost. Computed tokens are completion tokens and prompt tokens outside the cache, of
-- requests with a worker. The lowest cost is the device's price at the highest rate of tokens per busy
-- second, of any minute of a worker with a busy second or more. NULL: no data. Money is exact, as
-- text, cut after 12 digits. Joules are given per token for measured requests, and for everything that
-- workers' counters counted; NULL without a counter. Counts the minutes that begin in the range.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
WITH
    {{range}}
SELECT
    model,
    currency,
    sum(s.requests) AS requests,
    sum(s.tokens) AS tokens,
    toString(sum(s.paid)) AS paid,
    toString(sum(s.hour_busy_us) / 3600000000) AS busy_cost,
    toString((sum(s.hour_busy_us) + sum(s.hour_idle_us)) / 3600000000) AS all_cost,
    toString(sum(s.paid) * 1000000 / nullIf(sum(s.tokens), 0)) AS paid_per_million,
    toString(sum(s.hour_busy_us) / (3600 * nullIf(sum(s.tokens), 0))) AS busy_cost_per_million,
    toString((sum(s.hour_busy_us) + sum(s.hour_idle_us)) / (3600 * nullIf(sum(s.tokens), 0))) AS all_cost_per_million,
    toString(min(s.best)) AS best_cost_per_million,
    max(s.rate) AS best_tokens_per_busy_s,
    sum(s.busy_us) / nullIf(sum(s.busy_us) + sum(s.idle_us), 0) AS busy_share,
    1e6 * sum(s.energy_j) / nullIf(sum(s.energy_tokens), 0) AS busy_j_per_million,
    1e6 * sum(s.counted_j) / nullIf(sum(s.measured_tokens), 0) AS all_j_per_million
FROM
(
    SELECT
        model,
        currency,
        u.requests AS requests,
        if(price_version = '', 0, u.prompt_tokens - u.cached_tokens + u.completion_tokens) AS tokens,
        toDecimal256(u.cost, 12) AS paid,
        toDecimal256(0, 12) AS hour_busy_us,
        toDecimal256(0, 12) AS hour_idle_us,
        0 AS busy_us,
        0 AS idle_us,
        CAST(NULL, 'Nullable(Decimal(76, 12))') AS best,
        CAST(NULL, 'Nullable(Float64)') AS rate,
        u.energy_j AS energy_j,
        u.energy_tokens AS energy_tokens,
        CAST(NULL, 'Nullable(Float64)') AS counted_j,
        0 AS measured_tokens
    FROM usage_by_minute AS u FINAL
    WHERE {{workers_in_range}}
    UNION ALL
    SELECT
        model,
        currency,
        0,
        0,
        toDecimal256(0, 12),
        toDecimal256(device_per_hour, 12) * busy_us,
        toDecimal256(device_per_hour, 12) * idle_us,
        w.busy_us,
        w.idle_us,
        if(busy_us >= 1000000, toDecimal256(device_per_hour, 12) * busy_us / (3600 * nullIf(prefill_tokens + decode_tokens, 0)), NULL),
        if(busy_us >= 1000000, (prefill_tokens + decode_tokens) * 1e6 / busy_us, NULL),
        NULL,
        0,
        w.energy_j,
        if(isNull(w.energy_j), 0, prefill_tokens + decode_tokens)
    FROM workers_by_minute AS w FINAL
    WHERE {{workers_in_range}}
) AS s
GROUP BY model, currency
ORDER BY model, currency
