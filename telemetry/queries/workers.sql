-- What the workers did, in steps: tokens per second, sequences, queue, KV blocks in use.
-- Samples are averaged for each worker first, then added up; the queue belongs to a model, and
-- each of its workers sees all of it.
-- A short step is shown once it is over; of a long one, what there is of it so far.
-- param minutes: how far back to look (default 15)
-- param step_s: the length of a step (default 10)
WITH by_worker AS
(
    SELECT
        toUnixTimestamp(toStartOfInterval(sampled_at, toIntervalSecond({step_s:UInt32}))) AS t,
        model,
        worker,
        sum(decode_tokens) / least({step_s:UInt32}, greatest(1, toUnixTimestamp(now()) - t)) AS decode_per_s,
        sum(prefill_tokens) / least({step_s:UInt32}, greatest(1, toUnixTimestamp(now()) - t)) AS prefill_per_s,
        avg(num_running) AS running,
        avg(num_waiting) AS waiting,
        avg(queue_depth) AS queued,
        avg(num_blocks) AS blocks,
        avg(num_blocks - num_free_blocks) AS used_blocks,
        sum(busy_share * period_ms) / sum(period_ms) AS busy
    FROM worker_samples FINAL
    WHERE sampled_at >= toStartOfInterval(now() - toIntervalMinute({minutes:UInt32}), toIntervalSecond({step_s:UInt32}))
      AND sampled_at < if({step_s:UInt32} < 60, toStartOfInterval(now(), toIntervalSecond({step_s:UInt32})), now())
    GROUP BY t, model, worker
),
by_model AS
(
    SELECT
        t,
        model,
        sum(decode_per_s) AS decode_per_s,
        sum(prefill_per_s) AS prefill_per_s,
        sum(running) AS running,
        sum(waiting) AS waiting,
        max(queued) AS queued,
        sum(blocks) AS blocks,
        sum(used_blocks) AS used_blocks,
        sum(busy) AS busy,
        count() AS workers
    FROM by_worker
    GROUP BY t, model
)
SELECT
    t,
    sum(decode_per_s) AS decode_tokens_per_s,
    sum(prefill_per_s) AS prefill_tokens_per_s,
    sum(by_model.running) AS running,
    sum(by_model.waiting) AS waiting,
    sum(by_model.queued) AS queued,
    100 * sum(used_blocks) / greatest(sum(by_model.blocks), 1) AS kv_use_percent,
    100 * sum(by_model.busy) / sum(by_model.workers) AS busy_percent
FROM by_model
GROUP BY t
ORDER BY t
