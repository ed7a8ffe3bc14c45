-- What each tenant used and pays, and what it cost us: who pays most comes first.
-- Money is exact, as text; a row for each currency. Counted are the minutes that begin in the range:
-- of ranges that follow one another each request is in one.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
-- param rows: how many, at most 100000 (default 1000)
WITH
    toInt64(toUnixTimestamp(now())) AS now_s,
    if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
    if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS end_s
SELECT
    tenant,
    sum(u.requests) AS requests,
    sum(u.done) AS done,
    sum(u.cancelled) AS cancelled,
    sum(u.expired) AS expired,
    sum(u.shed) AS shed,
    sum(u.failed) AS failed,
    sum(u.prompt_tokens) AS prompt_tokens,
    sum(u.cached_tokens) AS cached_tokens,
    sum(u.completion_tokens) AS completion_tokens,
    toString(sum(u.cost)) AS cost,
    currency,
    sum(u.device_us) AS device_us,
    toString(sum(u.device_cost)) AS device_cost
FROM usage_by_minute AS u FINAL
WHERE minute >= toDateTime(begin_s, 'UTC')
  AND minute < toDateTime(end_s, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR model = {model:String})
GROUP BY tenant, currency
ORDER BY sum(u.cost) DESC, tenant, currency
LIMIT {rows:UInt32}
