-- What was used of each adapter (empty: of the model itself), what it brings and what it cost us.
-- Money is exact, as text; a row for each currency. Counted are the minutes that begin in the range:
-- of ranges that follow one another each request is in one.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param rows: how many of each currency, at most 100000 (default 1000)
WITH
    {{range}}
SELECT
    model,
    adapter,
    {{usage_sums}}
FROM usage_by_minute AS u FINAL
WHERE {{usage_in_range}}
GROUP BY model, adapter, currency
ORDER BY currency, sum(u.cost) DESC, model, adapter
LIMIT {rows:UInt32} BY currency
