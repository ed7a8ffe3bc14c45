-- What requests cost their tenants by the price book, and us in device time, by model, in steps.
-- Money is exact, as text, in the currency of its row.
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
    intDiv(toInt64(toUnixTimestamp(done_at)), step_s) * step_s AS t
SELECT
    t,
    if(model_served = '', model_requested, model_served) AS model,
    currency,
    toString(sum(requests.cost)) AS cost,
    toString(sum(requests.device_cost)) AS device_cost,
    count() AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(completion_tokens) AS completion_tokens
FROM requests FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR if(model_served = '', model_requested, model_served) = {model:String})
GROUP BY t, model, currency
ORDER BY t, model, currency
