-- Tenants and models with requests in the range, the busiest first, for filters.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param rows: number of each, at most 1000 (default 500)
WITH
    {{range}}
SELECT
    kind,
    name,
    sum(n) AS requests
FROM
(
    SELECT
        tenant,
        if(model_served = '', model_requested, model_served) AS model,
        count() AS n
    FROM requests FINAL
    WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
      AND done_at < toDateTime64(end_s, 6, 'UTC')
    GROUP BY tenant, model
)
ARRAY JOIN
    ['tenant', 'model'] AS kind,
    [tenant, model] AS name
GROUP BY kind, name
ORDER BY kind, requests DESC, name
LIMIT {rows:UInt32} BY kind
