-- Usage of each model, its price to tenants and its device cost.
-- Money is exact, as text; a row for each currency. Counts the minutes that begin in the range: in
-- consecutive ranges each request counts once.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param rows: number of rows for each currency, at most 100000 (default 1000)
WITH
    {{range}}
SELECT
    model,
    {{usage_sums}}
FROM usage_by_minute AS u FINAL
WHERE {{usage_in_range}}
GROUP BY model, currency
ORDER BY currency, sum(u.cost) DESC, model
LIMIT {rows:UInt32} BY currency
