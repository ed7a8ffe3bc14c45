-- Latencies of requests by percentile, in steps, in ms: TTFT, TPOT, ITL, E2E, and queue time.
-- TTFT is from receipt to the first token, TPOT the mean of a request's further tokens (each request
-- counts once), ITL the same with each token counting once, E2E from receipt to the end of answered
-- requests; each accurate to 1 %. Steps without a value are missing: no latency is not a latency of
-- zero. A short step that is not over yet is left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
WITH
    {{steps}},
    quantilesBFloat16If(0.5, 0.95, 0.99)(assumeNotNull(ttft_ms), isNotNull(ttft_ms)) AS ttft,
    quantilesBFloat16If(0.5, 0.95, 0.99)(assumeNotNull(tpot_ms), isNotNull(tpot_ms)) AS tpot,
    quantilesBFloat16WeightedIf(0.5, 0.95, 0.99)(assumeNotNull(tpot_ms), toUInt64(greatest(completion_tokens, 2) - 1), isNotNull(tpot_ms)) AS itl,
    quantilesBFloat16If(0.5, 0.95, 0.99)(total_ms, status = 'done') AS e2e,
    quantilesBFloat16If(0.5, 0.95, 0.99)(assumeNotNull(queue_ms), isNotNull(queue_ms)) AS queue
SELECT
    t,
    ttft[1] AS ttft_p50_ms,
    ttft[2] AS ttft_p95_ms,
    ttft[3] AS ttft_p99_ms,
    tpot[1] AS tpot_p50_ms,
    tpot[2] AS tpot_p95_ms,
    tpot[3] AS tpot_p99_ms,
    itl[1] AS itl_p50_ms,
    itl[2] AS itl_p95_ms,
    itl[3] AS itl_p99_ms,
    e2e[1] AS e2e_p50_ms,
    e2e[2] AS e2e_p95_ms,
    e2e[3] AS e2e_p99_ms,
    queue[1] AS queue_p50_ms,
    queue[2] AS queue_p95_ms,
    queue[3] AS queue_p99_ms
FROM requests FINAL
WHERE {{requests_in_range}}
GROUP BY t
ORDER BY t
