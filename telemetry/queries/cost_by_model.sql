-- Prices of requests to their tenants, and device cost to the operator, by model, in steps.
-- Money is exact, as text, in the currency of its row.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
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
