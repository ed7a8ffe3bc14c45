-- What requests cost their tenants by the price book, and us in device time, by model, in steps.
-- Money is exact, as text, in the currency of its row.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
-- param step_s: the length of a step (default 60)
WITH
    {{steps}}
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
WHERE {{requests_in_range}}
GROUP BY t, model, currency
ORDER BY t, model, currency
