-- What was used on each day (UTC), what tenants pay for it and what it cost us.
-- Money is exact, as text; a row for each currency. Counted are the minutes that begin in the range:
-- of ranges that follow one another each request is in one.
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
