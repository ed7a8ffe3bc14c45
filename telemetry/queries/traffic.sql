-- Requests that ended, per second, in steps over the range; quiet steps are there as zeros.
-- param minutes: how far back to look (default 15)
-- param step_s: the length of a step (default 10)
SELECT
    toUnixTimestamp(toStartOfInterval(done_at, toIntervalSecond({step_s:UInt32}))) AS t,
    countIf(status = 'done') / {step_s:UInt32} AS done_per_s,
    countIf(status != 'done') / {step_s:UInt32} AS other_per_s
FROM requests FINAL
WHERE done_at >= toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32}))
  AND done_at < toStartOfInterval(now(), toIntervalSecond({step_s:UInt32}))
GROUP BY t
ORDER BY t WITH FILL
    FROM toUnixTimestamp(toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32})))
    TO toUnixTimestamp(toStartOfInterval(now(), toIntervalSecond({step_s:UInt32})))
    STEP {step_s:UInt32}
