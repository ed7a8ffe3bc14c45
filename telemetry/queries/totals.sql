-- The range in one row: requests by how they ended, tokens, latencies and cost.
-- param minutes: how far back to look (default 15)
SELECT
    count() AS requests,
    countIf(status = 'done') AS done,
    countIf(status = 'cancelled') AS cancelled,
    countIf(status IN ('failed', 'expired')) AS failed,
    countIf(status = 'shed') AS shed,
    sum(prompt_tokens) AS prompt_tokens,
    sum(cached_tokens) AS cached_tokens,
    sum(completion_tokens) AS completion_tokens,
    quantileTDigestOrNull(0.5)(ttft_ms) AS ttft_p50_ms,
    quantileTDigestOrNull(0.95)(ttft_ms) AS ttft_p95_ms,
    quantileTDigestOrNull(0.5)(tpot_us) / 1000 AS tpot_p50_ms,
    quantileTDigestOrNull(0.95)(tpot_us) / 1000 AS tpot_p95_ms,
    toFloat64(sum(cost)) AS cost,
    any(currency) AS currency
FROM requests FINAL
WHERE done_at > now64(6) - toIntervalMinute({minutes:UInt32})
