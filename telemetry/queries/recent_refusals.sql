-- Latest refusals: a row for each gateway, second and kind.
-- Each row has the number of requests and the ids of the first eight.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param rows: number of rows, at most 500 (default 50)
WITH
    {{range}}
SELECT
    last_at,
    request_ids,
    {{refusal_columns}}
FROM refusals AS r FINAL
WHERE {{refusals_in_range}}
ORDER BY last_at DESC, gateway, number
LIMIT {rows:UInt32}
