-- Tokens of requests that ended, per second, in steps: output, prompt computed and prompt from the
-- prefix cache; quiet steps are there as zeros. A request's tokens count where it ended.
-- A short step that is not over yet is left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
-- param step_s: the length of a step (default 60)
WITH
    toInt64(toUnixTimestamp(now())) AS now_s,
    toInt64({step_s:UInt32}) AS step_s,
    if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
    if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS last_s,
    if(step_s < 60 AND last_s >= now_s, intDiv(now_s, step_s) * step_s, last_s) AS end_s,
    intDiv(toInt64(toUnixTimestamp(done_at)), step_s) * step_s AS t,
    greatest(1, least(t + step_s, end_s) - greatest(t, begin_s)) AS covered_s
SELECT
    t,
    sum(completion_tokens) / covered_s AS output_per_s,
    sum(prompt_tokens - cached_tokens) / covered_s AS prompt_per_s,
    sum(cached_tokens) / covered_s AS cached_per_s
FROM requests FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR if(model_served = '', model_requested, model_served) = {model:String})
GROUP BY t
ORDER BY t WITH FILL FROM intDiv(begin_s, step_s) * step_s TO end_s STEP step_s
