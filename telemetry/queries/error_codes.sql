-- Requests that did not end well, by model, status and error code, with one example of each.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
WITH
    {{range}}
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
WHERE {{requests_in_range}}
  AND status NOT IN ('done', 'cancelled')
GROUP BY model, status, error_code
ORDER BY requests DESC, model, status, error_code
