-- Use of the workers, by model, in steps of whole minutes.
-- Queue, sequences, KV blocks, batch size, busy time, step time and tokens per second. Levels are
-- means over time. The queue belongs to a model, and each of its workers sees all of it. Steps without
-- samples are missing.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param step_s: the length of a step, of whole minutes (default 3600)
WITH
    {{range}},
    toInt64({step_s:UInt32}) AS step_s
SELECT
    toDateTime(w.t, 'UTC') AS t,
    model,
    count() AS workers,
    sum(w.running_ms / w.period_ms) AS running,
    sum(w.waiting_ms / w.period_ms) AS waiting,
    max(w.queued_ms / w.period_ms) AS queued,
    max(w.most_queued) AS most_queued,
    sum(w.running_ms) / sum(w.period_ms) AS batch_size,
    100 * sum(w.used_blocks_ms) / nullIf(sum(w.blocks_ms), 0) AS kv_use_percent,
    100 * sum(w.busy_us) / nullIf(sum(w.busy_us) + sum(w.idle_us), 0) AS busy_percent,
    100 * sum(w.device_share_ms)
        / nullIf(sumIf(w.period_ms, isNotNull(w.device_share_ms)), 0) AS device_percent,
    max(w.device_memory_bytes) AS device_memory_bytes,
    max(w.device_memory_total_bytes) AS device_memory_total_bytes,
    sum(w.steps_ms) / nullIf(sum(w.num_steps), 0) AS step_ms,
    sum(w.decode_tokens * 1000 / w.period_ms) AS decode_tokens_per_s,
    sum(w.prefill_tokens * 1000 / w.period_ms) AS prefill_tokens_per_s,
    sum(w.num_preemptions) AS preemptions,
    100 * sum(w.prefix_hit_tokens) / nullIf(sum(w.prefix_query_tokens), 0) AS prefix_hit_percent
FROM
(
    SELECT
        intDiv(toInt64(toUnixTimestamp(minute)), step_s) * step_s AS t,
        model,
        worker,
        sum(m.period_ms) AS period_ms,
        sum(m.running_ms) AS running_ms,
        sum(m.waiting_ms) AS waiting_ms,
        sum(m.queued_ms) AS queued_ms,
        max(m.most_queued) AS most_queued,
        sum(m.blocks_ms) AS blocks_ms,
        sum(m.used_blocks_ms) AS used_blocks_ms,
        sum(m.busy_us) AS busy_us,
        sum(m.idle_us) AS idle_us,
        sum(m.device_share_ms) AS device_share_ms,
        max(m.device_memory_bytes) AS device_memory_bytes,
        max(m.device_memory_total_bytes) AS device_memory_total_bytes,
        sum(m.steps_ms) AS steps_ms,
        sum(m.num_steps) AS num_steps,
        sum(m.decode_tokens) AS decode_tokens,
        sum(m.prefill_tokens) AS prefill_tokens,
        sum(m.num_preemptions) AS num_preemptions,
        sum(m.prefix_hit_tokens) AS prefix_hit_tokens,
        sum(m.prefix_query_tokens) AS prefix_query_tokens
    FROM workers_by_minute AS m FINAL
    WHERE {{workers_in_range}}
    GROUP BY t, model, worker
    HAVING period_ms > 0
) AS w
GROUP BY t, model
ORDER BY t, model
