-- What the workers did, in steps: tokens per second, sequences, queue, KV blocks, device time and cost.
-- Samples are averaged for each worker first, then added up; the queue belongs to a model, and each
-- of its workers sees all of it. Money is for plotting; idle_cost of TABLES has it exact.
-- A short step that is not over yet is left out.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param model: only this model's (default '')
-- param step_s: the length of a step (default 60)
WITH
    toInt64(toUnixTimestamp(now())) AS now_s,
    toInt64({step_s:UInt32}) AS step_s,
    if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
    if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS last_s,
    if(step_s < 60 AND last_s >= now_s, intDiv(now_s, step_s) * step_s, last_s) AS end_s,
    by_worker AS
    (
        SELECT
            intDiv(toInt64(toUnixTimestamp(sampled_at)), step_s) * step_s AS t,
            greatest(1, least(t + step_s, end_s) - greatest(t, begin_s)) AS covered_s,
            model,
            worker,
            sum(decode_tokens) / covered_s AS decode_per_s,
            sum(prefill_tokens) / covered_s AS prefill_per_s,
            sum(s.num_preemptions) / covered_s AS preemptions_per_s,
            avg(num_running) AS running,
            avg(num_waiting) AS waiting,
            avg(queue_depth) AS queued,
            avg(s.num_blocks) AS blocks,
            avg(s.num_blocks - s.num_free_blocks) AS used_blocks,
            sum(busy_share * period_ms) / sum(period_ms) AS busy,
            sum(prefix_query_tokens) AS query_tokens,
            sum(prefix_hit_tokens) AS hit_tokens,
            sum(toFloat64(device_per_hour) * busy_us) / 3.6e9 AS busy_cost,
            sum(toFloat64(device_per_hour) * greatest(period_ms * 1000 - busy_us, 0)) / 3.6e9 AS idle_cost
        FROM worker_samples AS s FINAL
        WHERE sampled_at >= toDateTime64(begin_s, 6, 'UTC')
          AND sampled_at < toDateTime64(end_s, 6, 'UTC')
          AND ({model:String} = '' OR model = {model:String})
        GROUP BY t, model, worker
    ),
    by_model AS
    (
        SELECT
            t,
            model,
            count() AS num_workers,
            sum(decode_per_s) AS decode_per_s,
            sum(prefill_per_s) AS prefill_per_s,
            sum(preemptions_per_s) AS preemptions_per_s,
            sum(running) AS running,
            sum(waiting) AS waiting,
            max(queued) AS queued,
            sum(blocks) AS blocks,
            sum(used_blocks) AS used_blocks,
            sum(busy) AS busy,
            sum(query_tokens) AS query_tokens,
            sum(hit_tokens) AS hit_tokens,
            sum(busy_cost) AS busy_cost,
            sum(idle_cost) AS idle_cost
        FROM by_worker
        GROUP BY t, model
    )
SELECT
    t,
    sum(m.num_workers) AS workers,
    sum(m.decode_per_s) AS decode_tokens_per_s,
    sum(m.prefill_per_s) AS prefill_tokens_per_s,
    sum(m.preemptions_per_s) AS preemptions_per_s,
    sum(m.running) AS running,
    sum(m.running) / sum(m.num_workers) AS batch,
    sum(m.waiting) AS waiting,
    sum(m.queued) AS queued,
    100 * sum(m.used_blocks) / greatest(sum(m.blocks), 1) AS kv_use_percent,
    100 * sum(m.busy) / sum(m.num_workers) AS busy_percent,
    if(sum(m.query_tokens) = 0, NULL, 100 * sum(m.hit_tokens) / sum(m.query_tokens)) AS prefix_hit_percent,
    sum(m.busy_cost) AS busy_cost,
    sum(m.idle_cost) AS idle_cost
FROM by_model AS m
GROUP BY t
ORDER BY t
