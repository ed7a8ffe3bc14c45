-- Latencies by model, in ms: queue, TTFT, TPOT, ITL and E2E.
-- Queue time, time to first token (TTFT), time per further token with each request (TPOT) or each
-- token (ITL) counting once, and time to the end of answered requests (E2E). NULL: no request got so
-- far. Percentiles are estimates by t-digest.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
WITH
    {{range}}
SELECT
    model,
    l.requests AS requests,
    l.queue[1] AS queue_p50_ms,
    l.queue[2] AS queue_p90_ms,
    l.queue[3] AS queue_p95_ms,
    l.queue[4] AS queue_p99_ms,
    l.ttft[1] AS ttft_p50_ms,
    l.ttft[2] AS ttft_p90_ms,
    l.ttft[3] AS ttft_p95_ms,
    l.ttft[4] AS ttft_p99_ms,
    l.tpot[1] AS tpot_p50_ms,
    l.tpot[2] AS tpot_p90_ms,
    l.tpot[3] AS tpot_p95_ms,
    l.tpot[4] AS tpot_p99_ms,
    l.itl[1] AS itl_p50_ms,
    l.itl[2] AS itl_p90_ms,
    l.itl[3] AS itl_p95_ms,
    l.itl[4] AS itl_p99_ms,
    l.e2e[1] AS e2e_p50_ms,
    l.e2e[2] AS e2e_p90_ms,
    l.e2e[3] AS e2e_p95_ms,
    l.e2e[4] AS e2e_p99_ms
FROM
(
    SELECT
        if(model_served = '', model_requested, model_served) AS model,
        count() AS requests,
        arrayMap(ms -> if(isNaN(ms), NULL, ms), quantilesTDigest(0.5, 0.9, 0.95, 0.99)(r.queue_ms)) AS queue,
        arrayMap(ms -> if(isNaN(ms), NULL, ms), quantilesTDigest(0.5, 0.9, 0.95, 0.99)(r.ttft_ms)) AS ttft,
        arrayMap(ms -> if(isNaN(ms), NULL, ms), quantilesTDigest(0.5, 0.9, 0.95, 0.99)(r.tpot_us / 1000)) AS tpot,
        arrayMap(ms -> if(isNaN(ms), NULL, ms), quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99)(r.tpot_us / 1000, toUInt64(greatest(completion_tokens, 1) - 1))) AS itl,
        arrayMap(ms -> if(isNaN(ms), NULL, ms), quantilesTDigest(0.5, 0.9, 0.95, 0.99)(if(status = 'done', r.total_ms, NULL))) AS e2e
    FROM requests AS r FINAL
    WHERE {{requests_in_range}}
    GROUP BY model
) AS l
ORDER BY model
