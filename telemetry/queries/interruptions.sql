-- Interruptions in each step: attempts moved or preempted, requests shed, expired or failed.
-- Also their effects on clients: resumes and stalls. Steps without interruptions are missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param step_s: the length of a step (default 60)
WITH
    {{range}},
    toInt64({step_s:UInt32}) AS step_s
SELECT
    toDateTime(e.t, 'UTC') AS t,
    sum(e.moves) AS moves,
    sum(e.preemptions) AS preemptions,
    sum(e.shed) AS shed,
    sum(e.expired) AS expired,
    sum(e.failed) AS failed,
    sum(e.resumes) AS resumes,
    sum(e.stalls) AS stalls,
    sum(e.stalled_ms) AS stalled_ms
FROM
(
    SELECT
        intDiv(toInt64(toUnixTimestamp(done_at)), step_s) * step_s AS t,
        sum(length(lives)) AS moves,
        sum(num_preemptions) AS preemptions,
        countIf(status = 'shed') AS shed,
        countIf(status = 'expired') AS expired,
        countIf(status = 'failed') AS failed,
        toUInt64(0) AS resumes,
        toUInt64(0) AS stalls,
        toFloat64(0) AS stalled_ms
    FROM requests FINAL
    WHERE {{requests_in_range}}
    GROUP BY t
    UNION ALL
    SELECT
        intDiv(toInt64(toUnixTimestamp(done_at)), step_s) * step_s AS t,
        0, 0, 0, 0, 0,
        sum(num_resumes),
        sum(num_stalls),
        sum(deliveries.stalled_ms)
    FROM deliveries FINAL
    WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
      AND done_at < toDateTime64(end_s, 6, 'UTC')
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR model = {model:String})
    GROUP BY t
) AS e
GROUP BY t
HAVING moves + preemptions + shed + expired + failed + resumes + stalls > 0
ORDER BY t
