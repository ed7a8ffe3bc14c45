-- Share of requests that met their objectives, by model, in steps.
-- A request meets them if it is answered, its first token within ttft_ms, further tokens every tpot_ms
-- on average. Requests cancelled by clients do not count; shed, expired or failed requests count as
-- misses. Steps without requests are missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param step_s: the length of a step (default 3600)
-- param ttft_ms: objective for the time to first token, in ms (default 1000)
-- param tpot_ms: objective for the mean time per further token, in ms (default 100)
WITH
    {{range}},
    toInt64({step_s:UInt32}) AS step_s
SELECT
    toDateTime(intDiv(toInt64(toUnixTimestamp(done_at)), step_s) * step_s, 'UTC') AS t,
    if(model_served = '', model_requested, model_served) AS model,
    count() AS requests,
    countIf(status = 'done' AND r.ttft_ms <= {ttft_ms:Float64}) AS ttft_met,
    countIf(status = 'done' AND coalesce(r.tpot_ms, 0) <= {tpot_ms:Float64}) AS tpot_met,
    countIf(status = 'done' AND r.ttft_ms <= {ttft_ms:Float64} AND coalesce(r.tpot_ms, 0) <= {tpot_ms:Float64}) AS met,
    met / requests AS attainment,
    ttft_met / requests AS ttft_attainment,
    tpot_met / requests AS tpot_attainment
FROM requests AS r FINAL
WHERE {{requests_in_range}}
  AND status != 'cancelled'
GROUP BY t, model
ORDER BY t, model
