-- Usage and price of each user of each tenant, the most expensive first.
-- Money is exact, as text; a row for each currency. Counts the minutes that begin in the range: in
-- consecutive ranges each request counts once.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -2592000)
-- param rows: number of rows for each currency, at most 100000 (default 1000)
WITH
    {{range}}
SELECT
    tenant,
    user,
    {{usage_sums}}
FROM usage_by_minute AS u FINAL
WHERE {{usage_in_range}}
GROUP BY tenant, user, currency
ORDER BY currency, sum(u.cost) DESC, tenant, user
LIMIT {rows:UInt32} BY currency
