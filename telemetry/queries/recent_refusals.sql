-- The refusals that came last: a row for each second of a gateway and each kind, with how many requests
-- it was and the ids of the first eight of them, which are all where it was no more.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param rows: how many, at most 500 (default 50)
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
