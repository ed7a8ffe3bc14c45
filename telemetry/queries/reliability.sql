-- Failures and recoveries, by model, in steps of whole minutes.
-- Requests that were shed, failed, expired or cancelled, attempts that another worker continued
-- (moves), sequences that gave up their blocks (preemptions), and the effects on clients: resumes,
-- replays and stalls. Steps without requests are missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param step_s: the length of a step, of whole minutes (default 3600)
WITH
    {{range}},
    toInt64({step_s:UInt32}) AS step_s
SELECT
    toDateTime(intDiv(s.at_s, step_s) * step_s, 'UTC') AS t,
    model,
    sum(s.requests) AS requests,
    sum(s.shed) AS shed,
    sum(s.failed) AS failed,
    sum(s.expired) AS expired,
    sum(s.cancelled) AS cancelled,
    sum(s.moves) AS moves,
    sum(s.preemptions) AS preemptions,
    sum(s.deliveries) AS deliveries,
    sum(s.resumes) AS resumes,
    sum(s.replays) AS replays,
    sum(s.stalls) AS stalls,
    sum(s.stalled_ms) AS stalled_ms
FROM
(
    SELECT
        toInt64(toUnixTimestamp(minute)) AS at_s,
        model,
        u.requests AS requests,
        u.shed AS shed,
        u.failed AS failed,
        u.expired AS expired,
        u.cancelled AS cancelled,
        u.num_moves AS moves,
        u.num_preemptions AS preemptions,
        0 AS deliveries,
        0 AS resumes,
        0 AS replays,
        0 AS stalls,
        0.0 AS stalled_ms
    FROM usage_by_minute AS u FINAL
    WHERE {{usage_in_range}}
    UNION ALL
    SELECT
        toInt64(toUnixTimestamp(done_at)), model, 0, 0, 0, 0, 0, 0, 0,
        1, d.num_resumes, d.num_replays, d.num_stalls, d.stalled_ms
    FROM deliveries AS d FINAL
    WHERE toStartOfMinute(done_at) >= toDateTime(begin_s, 'UTC')
      AND toStartOfMinute(done_at) < toDateTime(end_s, 'UTC')
      AND ({tenant:String} = '' OR tenant = {tenant:String})
      AND ({model:String} = '' OR model = {model:String})
) AS s
GROUP BY t, model
ORDER BY t, model
