-- Requests with all their data, in the order of their ends: one page of an export.
-- The next page begins after the last row's done_us and request_hash.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param status: only requests with this status, one of done|cancelled|expired|shed|failed (default '')
-- param id: only requests whose id begins with this text (default '')
-- param after_us: done_us of the previous page's last row (default 0)
-- param after_hash: request_hash of the previous page's last row (default 0)
-- param rows: number of rows, at most 5000 (default 500)
WITH
    {{range}}
SELECT
    request_id,
    tenant,
    key_id,
    user,
    session,
    metadata,
    source,
    tier,
    model_requested,
    model_served,
    route_reason,
    worker,
    adapter,
    status,
    finish_reason,
    error_code,
    prompt_tokens,
    cached_tokens,
    completion_tokens,
    queue_ms,
    ttft_ms,
    tpot_ms,
    total_ms,
    toString(requests.cost) AS cost,
    currency,
    price_version,
    device_us,
    toString(requests.device_cost) AS device_cost,
    energy_j,
    received_at,
    dispatched_at,
    started_at,
    first_token_at,
    done_at,
    epoch,
    num_preemptions,
    length(lives) AS num_earlier_runs,
    trace_id,
    toUnixTimestamp64Micro(done_at) AS done_us,
    cityHash64(request_id) AS request_hash
FROM requests FINAL
WHERE (toStartOfMinute(received_at), request_id) IN
(
    SELECT
        toStartOfMinute(received_at),
        request_id
    FROM requests FINAL
    WHERE {{requests_in_range}}
      AND ({status:String} = '' OR status = {status:String})
      AND ({id:String} = '' OR startsWith(request_id, {id:String}))
      AND done_at >= fromUnixTimestamp64Micro({after_us:Int64}, 'UTC')
      AND (toUnixTimestamp64Micro(done_at) > {after_us:Int64} OR cityHash64(request_id) > {after_hash:UInt64})
    ORDER BY toUnixTimestamp64Micro(done_at), cityHash64(request_id)
    LIMIT {rows:UInt32}
)
ORDER BY done_us, request_hash
