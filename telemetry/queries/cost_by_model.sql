-- What requests cost their tenants by the price book, for each model, in steps over the range.
-- param minutes: how far back to look (default 15)
-- param step_s: the length of a step (default 60)
SELECT
    toUnixTimestamp(toStartOfInterval(done_at, toIntervalSecond({step_s:UInt32}))) AS t,
    model_served AS model,
    currency,
    toFloat64(sum(cost)) AS cost,
    count() AS requests,
    sum(prompt_tokens + completion_tokens) AS tokens
FROM requests FINAL
WHERE done_at >= toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32}))
  AND model_served != ''
GROUP BY t, model, currency
ORDER BY t, model, currency
