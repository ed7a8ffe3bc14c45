-- The requests that ended last.
-- param minutes: how far back to look (default 15)
-- param rows: how many at most (default 50)
SELECT
    request_id,
    toUnixTimestamp64Milli(done_at) AS done_ms,
    tenant,
    source,
    tier,
    if(model_served = '', model_requested, model_served) AS model,
    model_requested,
    route_reason,
    worker,
    status,
    finish_reason,
    error_code,
    prompt_tokens,
    cached_tokens,
    completion_tokens,
    queue_ms,
    ttft_ms,
    tpot_us / 1000 AS tpot_ms,
    total_ms,
    toFloat64(cost) AS cost,
    currency,
    epoch
FROM requests FINAL
WHERE done_at > now64(6) - toIntervalMinute({minutes:UInt32})
ORDER BY done_at DESC
LIMIT {rows:UInt32}
