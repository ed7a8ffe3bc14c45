-- Latency from a request to its first token, by model, at the worker and at the client, in ms.
-- TTFT is from receipt to the worker's first token. First byte is the client's view without the
-- network: from the end of the request's head at the gateway to the gateway's write of the first
-- token. It is the sum of intake (key, body, parsing: before receipt), TTFT and the way back (over the
-- bus and through the gateway). Only requests with both values count. Percentiles, accurate to 1 %,
-- are of each part by itself, so the parts need not add up. An answer that is not streamed stays at
-- the gateway until its end. An empty model: all models together. The way back compares the clocks of
-- two machines if there are two.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
WITH
    {{range}},
    quantilesBFloat16(0.5, 0.95, 0.99)(d.intake_ms) AS intake,
    quantilesBFloat16(0.5, 0.95, 0.99)(assumeNotNull(r.ttft_ms)) AS ttft,
    quantilesBFloat16(0.5, 0.95, 0.99)(d.first_byte_ms - assumeNotNull(r.ttft_ms)) AS way_back,
    quantilesBFloat16(0.5, 0.95, 0.99)(ifNull(d.intake_ms, 0) + d.first_byte_ms) AS first_byte
SELECT
    d.model AS model,
    count() AS requests,
    intake[1] AS intake_p50_ms,
    intake[2] AS intake_p95_ms,
    intake[3] AS intake_p99_ms,
    ttft[1] AS ttft_p50_ms,
    ttft[2] AS ttft_p95_ms,
    ttft[3] AS ttft_p99_ms,
    way_back[1] AS way_back_p50_ms,
    way_back[2] AS way_back_p95_ms,
    way_back[3] AS way_back_p99_ms,
    first_byte[1] AS first_byte_p50_ms,
    first_byte[2] AS first_byte_p95_ms,
    first_byte[3] AS first_byte_p99_ms
FROM
(
    SELECT request_id, ttft_ms
    FROM requests FINAL
    WHERE done_at >= toDateTime64(begin_s - 600, 6, 'UTC')
      AND done_at < toDateTime64(end_s + 600, 6, 'UTC')
      AND ttft_ms IS NOT NULL
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR model_served = {model:String})
) AS r
INNER JOIN
(
    SELECT request_id, deliveries.model AS model, intake_ms, first_byte_ms
    FROM deliveries FINAL
    WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
      AND done_at < toDateTime64(end_s, 6, 'UTC')
      AND first_byte_ms > 0
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR deliveries.model = {model:String})
) AS d ON d.request_id = r.request_id
GROUP BY GROUPING SETS ((d.model), ())
HAVING requests > 0
ORDER BY d.model
