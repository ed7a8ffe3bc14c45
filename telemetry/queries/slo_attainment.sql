-- How many requests were served as was promised, by model, in steps.
-- That is: answered, the first token within ttft_ms, the others every tpot_ms on average. Those that
-- clients cancelled do not count; those that were shed, expired or failed count as not served so. A
-- step without requests is not there.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param step_s: the length of a step (default 3600)
-- param ttft_ms: the most that the first token may take (default 1000)
-- param tpot_ms: the most that a further token may take on average (default 100)
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
