-- Tokens of ended requests, per second, in steps: output, computed prompt, prompt from the prefix cache.
-- Quiet steps are zeros. A request's tokens count where it ended. A short step that is not over yet is
-- left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
WITH
    {{steps}},
    toInt64(toUnixTimestamp(t)) AS t_s,
    greatest(1, least(t_s + step_s, end_s) - greatest(t_s, begin_s)) AS covered_s
SELECT
    t,
    sum(completion_tokens) / covered_s AS output_per_s,
    sum(prompt_tokens - cached_tokens) / covered_s AS prompt_per_s,
    sum(cached_tokens) / covered_s AS cached_per_s
FROM requests FINAL
WHERE {{requests_in_range}}
GROUP BY t
ORDER BY t WITH FILL FROM toDateTime(intDiv(begin_s, step_s) * step_s, 'UTC') TO toDateTime(end_s, 'UTC') STEP step_s
