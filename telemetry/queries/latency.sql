-- Time to first token and time per further token, median and 95th percentile, in steps.
-- A step without a first token is not there: no latency is not a latency of zero.
-- A short step is shown once it is over; of a long one, what there is of it so far.
-- param minutes: how far back to look (default 15)
-- param step_s: the length of a step (default 10)
SELECT
    toUnixTimestamp(toStartOfInterval(done_at, toIntervalSecond({step_s:UInt32}))) AS t,
    quantileTDigestOrNull(0.5)(ttft_ms) AS ttft_p50_ms,
    quantileTDigestOrNull(0.95)(ttft_ms) AS ttft_p95_ms,
    quantileTDigestOrNull(0.5)(tpot_us) / 1000 AS tpot_p50_ms,
    quantileTDigestOrNull(0.95)(tpot_us) / 1000 AS tpot_p95_ms
FROM requests FINAL
WHERE done_at >= toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32}))
  AND done_at < if({step_s:UInt32} < 60, toStartOfInterval(now(), toIntervalSecond({step_s:UInt32})), now())
  AND ttft_ms IS NOT NULL
GROUP BY t
ORDER BY t
