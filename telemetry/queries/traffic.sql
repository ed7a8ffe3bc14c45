-- Requests that ended, per second, by status, in steps.
-- Quiet steps are zeros. The first and the last step count only with their part in the range. A short
-- step that is not over yet is left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
WITH
    {{steps}},
    toInt64(toUnixTimestamp(t)) AS t_s,
    greatest(1, least(t_s + step_s, end_s) - greatest(t_s, begin_s)) AS covered_s
SELECT
    t,
    countIf(status = 'done') / covered_s AS done_per_s,
    countIf(status = 'cancelled') / covered_s AS cancelled_per_s,
    countIf(status = 'shed') / covered_s AS shed_per_s,
    countIf(status IN ('failed', 'expired')) / covered_s AS failed_per_s
FROM requests FINAL
WHERE {{requests_in_range}}
GROUP BY t
ORDER BY t WITH FILL FROM toDateTime(intDiv(begin_s, step_s) * step_s, 'UTC') TO toDateTime(end_s, 'UTC') STEP step_s
