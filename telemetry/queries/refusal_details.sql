-- One refused request by its id, if it was among the first eight of its kind, gateway and second.
-- param id: the id that its answer had
SELECT
    toUnixTimestamp64Milli(first_at) AS first_ms,
    toUnixTimestamp64Milli(last_at) AS last_ms,
    tenant,
    api_key,
    door,
    status,
    code,
    limit_reached,
    r.requests AS refused,
    gateway
FROM refusals AS r FINAL
WHERE has(request_ids, {id:String})
ORDER BY last_at DESC
LIMIT 1
