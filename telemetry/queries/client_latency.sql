-- First byte at the client without the network, by percentile, in steps, in ms: see first_byte.
-- Accurate to 1 %. Steps without answers are missing. A short step that is not over yet is left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
WITH
    {{steps}},
    quantilesBFloat16(0.5, 0.95, 0.99)(ifNull(intake_ms, 0) + first_byte_ms) AS first_byte
SELECT
    t,
    first_byte[1] AS first_byte_p50_ms,
    first_byte[2] AS first_byte_p95_ms,
    first_byte[3] AS first_byte_p99_ms
FROM deliveries FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR model = {model:String})
  AND first_byte_ms > 0
GROUP BY t
ORDER BY t
