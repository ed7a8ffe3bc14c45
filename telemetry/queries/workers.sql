-- Activity of the workers, in steps: tokens per second, sequences, queue, KV blocks and device time.
-- Levels are means over time, of each worker first and then added up; the queue belongs to a model,
-- and each of its workers sees all of it. A short step that is not over yet is left out; steps of a
-- minute or more are of whole minutes. An idle worker reports twice a minute, so its last half minute
-- may be missing. device_cost has the cost of the devices.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param step_s: the length of a step (default 60)
WITH
    {{worker_steps}},
    sums AS
    (
        SELECT
            toInt64(toUnixTimestamp(minute)) AS at_s,
            model,
            worker,
            w.period_ms AS period_ms,
            w.busy_us AS busy_us,
            (w.busy_us + w.idle_us) / 1000 AS device_ms,
            w.decode_tokens AS decode_tokens,
            w.prefill_tokens AS prefill_tokens,
            w.num_preemptions AS preemptions,
            w.running_ms AS running_ms,
            w.waiting_ms AS waiting_ms,
            w.queued_ms AS queued_ms,
            w.blocks_ms AS blocks_ms,
            w.used_blocks_ms AS used_blocks_ms,
            w.prefix_query_tokens AS query_tokens,
            w.prefix_hit_tokens AS hit_tokens
        FROM workers_by_minute AS w FINAL
        WHERE {{workers_in_range}}
          AND step_s >= 60
        UNION ALL
        SELECT
            toInt64(toUnixTimestamp(sampled_at)) - (num_pieces > 1) - piece * step_s,
            model,
            worker,
            s.period_ms / num_pieces AS period_ms,
            s.busy_us,
            period_ms * s.num_devices,
            s.decode_tokens,
            s.prefill_tokens,
            s.num_preemptions,
            s.num_running * period_ms,
            s.num_waiting * period_ms,
            s.queue_depth * period_ms,
            ifNull(s.num_blocks, 0) * period_ms,
            ifNull(toInt64(s.num_blocks) - toInt64(s.num_free_blocks), 0) * period_ms,
            s.prefix_query_tokens,
            s.prefix_hit_tokens
        FROM
        (
            {{worker_pieces}}
        ) AS s
    ),
    by_worker AS
    (
        SELECT
            intDiv(at_s, step_s) * step_s AS t,
            model,
            worker,
            greatest(sum(x.period_ms), 1) AS period_ms,
            sum(x.busy_us) / 1000 / greatest(sum(x.device_ms), 1) AS busy,
            sum(x.decode_tokens) AS decode_tokens,
            sum(x.prefill_tokens) AS prefill_tokens,
            sum(x.preemptions) AS preemptions,
            sum(x.running_ms) / period_ms AS running,
            sum(x.waiting_ms) / period_ms AS waiting,
            sum(x.queued_ms) / period_ms AS queued,
            sum(x.blocks_ms) / period_ms AS blocks,
            sum(x.used_blocks_ms) / period_ms AS used_blocks,
            sum(x.query_tokens) AS query_tokens,
            sum(x.hit_tokens) AS hit_tokens
        FROM sums AS x
        WHERE x.at_s >= begin_s AND x.at_s < end_s
        GROUP BY t, model, worker
    ),
    by_model AS
    (
        SELECT
            t,
            model,
            count() AS workers,
            sum(b.busy) AS busy,
            sum(b.decode_tokens) AS decode_tokens,
            sum(b.prefill_tokens) AS prefill_tokens,
            sum(b.preemptions) AS preemptions,
            sum(b.running) AS running,
            sum(b.waiting) AS waiting,
            max(b.queued) AS queued,
            sum(b.blocks) AS blocks,
            sum(b.used_blocks) AS used_blocks,
            sum(b.query_tokens) AS query_tokens,
            sum(b.hit_tokens) AS hit_tokens
        FROM by_worker AS b
        GROUP BY t, model
    )
SELECT
    toDateTime(m.t, 'UTC') AS t,
    sum(m.workers) AS workers,
    sum(m.decode_tokens) / greatest(1, least(m.t + step_s, end_s) - greatest(m.t, begin_s)) AS decode_tokens_per_s,
    sum(m.prefill_tokens) / greatest(1, least(m.t + step_s, end_s) - greatest(m.t, begin_s)) AS prefill_tokens_per_s,
    sum(m.preemptions) AS preemptions,
    sum(m.running) AS running,
    sum(m.running) / sum(m.workers) AS batch,
    sum(m.waiting) AS waiting,
    sum(m.queued) AS queued,
    100 * sum(m.used_blocks) / greatest(sum(m.blocks), 1) AS kv_use_percent,
    100 * sum(m.busy) / sum(m.workers) AS busy_percent,
    if(sum(m.query_tokens) = 0, NULL, 100 * sum(m.hit_tokens) / sum(m.query_tokens)) AS prefix_hit_percent
FROM by_model AS m
GROUP BY m.t
ORDER BY t
