-- Share of requests that met their objectives, by model, and the rest of the error budget.
-- A request meets them if it is answered, its first token within ttft_ms, further tokens every tpot_ms
-- on average. Requests cancelled by clients do not count; shed, expired or failed requests are misses.
-- target is the promised share, 1 - target the error budget. budget_left is its remaining share in the
-- window that ends with the range (below 0: overspent). burn_rate is the speed at which the range
-- spends it (1: it lasts exactly for the window).
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param model: only this model's (default '')
-- param tenant: only this tenant's (default '')
-- param ttft_ms: objective for the time to first token, in ms (default 1000)
-- param tpot_ms: objective for the mean time per further token, in ms (default 100)
-- param target: promised share of requests (default 0.95)
-- param window_s: length of the window in seconds (default 2592000)
WITH
    {{range}},
    least(begin_s, end_s - {window_s:Int64}) AS earliest_s
SELECT
    if(model_served = '', model_requested, model_served) AS model,
    countIf(is_in_range) AS requests,
    countIf(is_in_range AND is_ttft_met) AS ttft_met,
    countIf(is_in_range AND is_tpot_met) AS tpot_met,
    countIf(is_in_range AND is_ttft_met AND is_tpot_met) AS met,
    if(requests = 0, NULL, met / requests) AS attainment,
    if(requests = 0, NULL, (1 - attainment) / (1 - {target:Float64})) AS burn_rate,
    countIf(is_in_window) AS window_requests,
    countIf(is_in_window AND is_ttft_met AND is_tpot_met) AS window_met,
    if(window_requests = 0, NULL, window_met / window_requests) AS window_attainment,
    if(window_requests = 0, NULL, 1 - (1 - window_attainment) / (1 - {target:Float64})) AS budget_left,
    {target:Float64} AS target,
    {ttft_ms:Float64} AS ttft_ms,
    {tpot_ms:Float64} AS tpot_ms,
    {window_s:Int64} AS window_s
FROM
(
    SELECT
        model_served,
        model_requested,
        done_at >= toDateTime64(begin_s, 6, 'UTC') AS is_in_range,
        done_at >= toDateTime64(end_s - {window_s:Int64}, 6, 'UTC') AS is_in_window,
        ifNull(status = 'done' AND r.ttft_ms <= {ttft_ms:Float64}, 0) AS is_ttft_met,
        status = 'done' AND coalesce(r.tpot_us, 0) <= 1000 * {tpot_ms:Float64} AS is_tpot_met
    FROM requests AS r FINAL
    WHERE done_at >= toDateTime64(earliest_s, 6, 'UTC')
      AND done_at < toDateTime64(end_s, 6, 'UTC')
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR if(model_served = '', model_requested, model_served) = {model:String})
      AND status != 'cancelled'
)
GROUP BY model
ORDER BY model
