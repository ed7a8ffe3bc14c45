-- Slowest requests, by total time, time to first token, queue time or time per token.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param by: the compared latency, one of total|ttft|queue|tpot (default total)
-- param rows: number of rows, at most 1000 (default 20)
WITH
    {{range}}
SELECT
    request_id,
    done_at,
    tenant,
    key_id,
    user,
    if(model_served = '', model_requested, model_served) AS model,
    worker,
    status,
    prompt_tokens,
    cached_tokens,
    completion_tokens,
    queue_ms,
    ttft_ms,
    tpot_ms,
    total_ms,
    num_preemptions,
    length(lives) AS moves,
    device_us,
    energy_j,
    toString(r.cost) AS cost,
    currency,
    trace_id
FROM requests AS r FINAL
WHERE {{requests_in_range}}
ORDER BY
    multiIf({by:String} = 'ttft', ttft_ms, {by:String} = 'queue', queue_ms, {by:String} = 'tpot', tpot_ms, total_ms) DESC NULLS LAST,
    request_id
LIMIT {rows:UInt32}
