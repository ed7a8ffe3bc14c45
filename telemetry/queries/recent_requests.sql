-- Latest ended requests, with their usage and cost.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param status: only requests with this status, one of done|cancelled|expired|shed|failed (default '')
-- param id: only requests whose id begins with this text (default '')
-- param rows: number of rows, at most 500 (default 50)
WITH
    {{range}}
SELECT
    request_id,
    done_at,
    tenant,
    key_id,
    user,
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
    tpot_ms,
    total_ms,
    toString(requests.cost) AS cost,
    toString(requests.device_cost) AS device_cost,
    energy_j,
    currency,
    epoch,
    length(lives) AS num_lives
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
    ORDER BY done_at DESC, request_id
    LIMIT {rows:UInt32}
)
ORDER BY done_at DESC, request_id
