-- Requests that gateways refused, by tenant, key, door and reason; the most first.
-- Accepted requests that were shed or failed are in error_codes instead, never in both. An empty
-- tenant: an unknown caller. The door "others": the excess if there were too many kinds to list.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param rows: number of rows, at most 100000 (default 1000)
WITH
    {{range}}
SELECT
    tenant,
    api_key,
    door,
    status,
    code,
    limit_reached,
    sum(r.requests) AS refused,
    min(r.first_at) AS first_at,
    max(r.last_at) AS last_at,
    argMax(r.request_id, r.last_at) AS request_id
FROM refusals AS r FINAL
WHERE {{refusals_in_range}}
GROUP BY tenant, api_key, door, status, code, limit_reached
ORDER BY refused DESC, tenant, api_key, door, status, code, limit_reached
LIMIT {rows:UInt32}
