-- Requests that did not end well, by model, how they ended and why, with one of each to look at.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
WITH
    toInt64(toUnixTimestamp(now())) AS now_s,
    if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
    if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS end_s
SELECT
    if(model_served = '', model_requested, model_served) AS model,
    status,
    error_code,
    count() AS requests,
    uniqExact(tenant) AS tenants,
    uniqExact(worker) AS workers,
    min(r.done_at) AS first_at,
    max(r.done_at) AS last_at,
    argMax(request_id, r.done_at) AS latest_request_id
FROM requests AS r FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND status NOT IN ('done', 'cancelled')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR if(model_served = '', model_requested, model_served) = {model:String})
GROUP BY model, status, error_code
ORDER BY requests DESC, model, status, error_code
