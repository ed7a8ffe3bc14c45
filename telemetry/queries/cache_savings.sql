-- Savings by the prefix cache, by model and price version.
-- Prompt tokens found in the cache, and the money that tenants saved compared with computing them.
-- Requests without a worker are left out. Money is exact, as text; NULL if the store does not know the
-- prices of that version. Counts the minutes that begin in the range.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
WITH
    {{range}}
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
    WHERE {{usage_in_range}}
      AND price_version != ''
    GROUP BY model, price_version, currency
) AS l
{{price_book}}
ORDER BY model, price_version, currency
