-- Invoice of a tenant for a range, such as a month, by model, adapter, tier and price version.
-- amount is exact: the sum of what each request was charged. by_price_book is recomputed from tokens
-- and the price book, NULL if the store does not know that version; difference should be 0. Requests
-- without a worker cost nothing and are left out. Money is exact, as text; a row for each currency.
-- Counts the minutes that begin in the range: in consecutive ranges each request counts once.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param tenant: only this tenant's; empty: all (default '')
WITH
    {{range}}
SELECT
    tenant,
    model,
    adapter,
    tier,
    price_version,
    currency,
    l.requests AS requests,
    l.computed_tokens AS computed_tokens,
    l.cached_tokens AS cached_tokens,
    l.completion_tokens AS completion_tokens,
    toString(p.input_per_million) AS input_per_million,
    toString(p.cached_input_per_million) AS cached_input_per_million,
    toString(p.output_per_million) AS output_per_million,
    toString(l.amount) AS amount,
    toString((toDecimal256(p.input_per_million, 18) * l.computed_tokens + toDecimal256(p.cached_input_per_million, 18) * l.cached_tokens + toDecimal256(p.output_per_million, 18) * l.completion_tokens) / 1000000 AS book) AS by_price_book,
    toString(toDecimal256(l.amount, 18) - book) AS difference
FROM
(
    SELECT
        tenant, model, adapter, tier, price_version, currency,
        sum(u.requests) AS requests,
        sum(u.prompt_tokens) - sum(u.cached_tokens) AS computed_tokens,
        sum(u.cached_tokens) AS cached_tokens,
        sum(u.completion_tokens) AS completion_tokens,
        sum(u.cost) AS amount
    FROM usage_by_minute AS u FINAL
    WHERE minute >= toDateTime(begin_s, 'UTC')
      AND minute < toDateTime(end_s, 'UTC')
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND price_version != ''
    GROUP BY tenant, model, adapter, tier, price_version, currency
) AS l
{{price_book}}
ORDER BY tenant, currency, model, adapter, tier, price_version
