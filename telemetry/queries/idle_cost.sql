-- Cost of each worker's device while busy and while idle, and the busy time charged to no request.
-- Money is exact, as text, cut after 12 digits. Joules are NULL without a counter. Counts the minutes
-- that begin in the range; a sample's period counts in the minute in which it ended.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
WITH
    {{range}}
SELECT
    model,
    worker,
    max(w.name) AS name,
    max(w.device_name) AS device_name,
    currency,
    sum(w.busy_us) AS busy_us,
    sum(w.idle_us) AS idle_us,
    sum(w.charged_us) AS charged_us,
    sum(w.busy_us) / nullIf(sum(w.busy_us) + sum(w.idle_us), 0) AS busy_share,
    toString(sum(toDecimal256(device_per_hour, 12) * w.busy_us) / 3600000000) AS busy_cost,
    toString(sum(toDecimal256(device_per_hour, 12) * w.idle_us) / 3600000000) AS idle_cost,
    toString(sum(toDecimal256(device_per_hour, 12) * (toInt64(w.busy_us) - toInt64(w.charged_us))) / 3600000000) AS uncharged_cost,
    sumOrNull(w.energy_j) AS energy_j,
    sumOrNull(w.charged_j) AS charged_j,
    energy_j - charged_j AS idle_j
FROM workers_by_minute AS w FINAL
WHERE {{workers_in_range}}
GROUP BY model, worker, currency
ORDER BY model, name, worker, currency
