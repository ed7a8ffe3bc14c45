-- Usage of each day (UTC), its price to tenants and its device cost.
-- Money is exact, as text; a row for each currency. Counts the minutes that begin in the range: in
-- consecutive ranges each request counts once.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
WITH
    {{range}}
SELECT
    toDate(minute, 'UTC') AS day,
    {{usage_sums}}
FROM usage_by_minute AS u FINAL
WHERE {{usage_in_range}}
GROUP BY day, currency
ORDER BY day, currency
