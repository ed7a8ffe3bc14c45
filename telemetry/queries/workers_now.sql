-- Each worker that has reported within the last 15 seconds, by its latest sample.
SELECT
    worker,
    argMax(name, sampled_at) AS name,
    argMax(model, sampled_at) AS model,
    argMax(num_running, sampled_at) AS running,
    argMax(num_waiting, sampled_at) AS waiting,
    argMax(num_blocks, sampled_at) AS blocks,
    argMax(num_free_blocks, sampled_at) AS free_blocks,
    argMax(busy_share, sampled_at) AS busy_share,
    argMax(step_ms_mean, sampled_at) AS step_ms,
    toUnixTimestamp64Milli(max(worker_samples.sampled_at)) AS sampled_ms
FROM worker_samples FINAL
WHERE sampled_at > now64(6) - toIntervalSecond(15)
GROUP BY worker
ORDER BY name
