-- Requests that gateways refused, by reason (limit, else error code), in steps.
-- Steps without refusals are missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param step_s: the length of a step (default 60)
WITH
    {{range}},
    toInt64({step_s:UInt32}) AS step_s
SELECT
    toDateTime(intDiv(toInt64(toUnixTimestamp(recorded_at)), step_s) * step_s, 'UTC') AS t,
    status,
    multiIf(limit_reached != '', limit_reached, code != '', code, door) AS reason,
    sum(r.requests) AS refused
FROM refusals AS r FINAL
WHERE {{refusals_in_range}}
GROUP BY t, status, reason
ORDER BY t, status, reason
