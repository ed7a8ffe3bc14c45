-- Requests that ended, per second, in steps over the range; quiet steps are there as zeros.
-- A short step is shown once it is over; of a long one, what there is of it so far.
-- param minutes: how far back to look (default 15)
-- param step_s: the length of a step (default 10)
SELECT
    toUnixTimestamp(toStartOfInterval(done_at, toIntervalSecond({step_s:UInt32}))) AS t,
    countIf(status = 'done') / least({step_s:UInt32}, greatest(1, toUnixTimestamp(now()) - t)) AS done_per_s,
    countIf(status != 'done') / least({step_s:UInt32}, greatest(1, toUnixTimestamp(now()) - t)) AS other_per_s
FROM requests FINAL
WHERE done_at >= toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32}))
  AND done_at < if({step_s:UInt32} < 60, toStartOfInterval(now(), toIntervalSecond({step_s:UInt32})), now())
GROUP BY t
ORDER BY t WITH FILL
    FROM toUnixTimestamp(toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32})))
    TO toUnixTimestamp(if({step_s:UInt32} < 60, toStartOfInterval(now(), toIntervalSecond({step_s:UInt32})), now()))
    STEP {step_s:UInt32}
