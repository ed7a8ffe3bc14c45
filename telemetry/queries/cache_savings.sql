-- What the prefix cache saved, by model and price version.
-- Prompt tokens that were found there, and by how much less tenants paid for them than if they had
-- been computed. Requests that no worker had are left out. Money is exact, as text; NULL where the
-- store does not know the prices of that version. Counted are the minutes that begin in the range.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
WITH
    toInt64(toUnixTimestamp(now())) AS now_s,
    if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
    if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS end_s
SELECT
    model,
    price_version,
    currency,
    l.requests AS requests,
    l.prompt_tokens AS prompt_tokens,
    l.cached_tokens AS cached_tokens,
    l.cached_tokens / nullIf(l.prompt_tokens, 0) AS cached_share,
    toString(toDecimal256(p.cached_input_per_million, 18) * l.cached_tokens / 1000000) AS paid_for_cached,
    toString((toDecimal256(p.input_per_million, 18) - toDecimal256(p.cached_input_per_million, 18)) * l.cached_tokens / 1000000) AS saved
FROM
(
    SELECT
        model, price_version, currency,
        sum(u.requests) AS requests,
        sum(u.prompt_tokens) AS prompt_tokens,
        sum(u.cached_tokens) AS cached_tokens
    FROM usage_by_minute AS u FINAL
    WHERE minute >= toDateTime(begin_s, 'UTC')
      AND minute < toDateTime(end_s, 'UTC')
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR model = {model:String})
      AND price_version != ''
    GROUP BY model, price_version, currency
) AS l
LEFT JOIN
(
    SELECT
        model,
        version,
        toNullable(input_per_million) AS input_per_million,
        toNullable(cached_input_per_million) AS cached_input_per_million
    FROM prices FINAL
) AS p ON p.model = l.model AND p.version = l.price_version
ORDER BY model, price_version, currency
