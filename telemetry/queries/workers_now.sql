-- Each worker that reported within the last 15 seconds, by its latest sample.
-- An idle worker, which reports twice a minute, counts within the last 45 seconds. KV tokens pulled
-- from and by other workers are of these 45 seconds.
-- param model: only this model's (default '')
SELECT
    worker,
    argMax(s.name, sampled_at) AS name,
    argMax(s.model, sampled_at) AS model,
    argMax(num_running, sampled_at) AS running,
    argMax(num_waiting, sampled_at) AS waiting,
    argMax(num_blocks, sampled_at) AS blocks,
    argMax(num_free_blocks, sampled_at) AS free_blocks,
    argMax(s.busy_share, sampled_at) AS busy_share,
    argMax(step_ms_mean, sampled_at) AS step_ms,
    argMax(s.role, sampled_at) AS role,
    sum(s.pulled_tokens) AS pulled_tokens,
    sum(s.served_tokens) AS served_tokens,
    argMax(s.num_devices, sampled_at) AS num_devices,
    argMax(s.device_name, sampled_at) AS device_name,
    argMax(s.device_share, sampled_at) AS device_share,
    argMax(s.device_memory_bytes, sampled_at) AS device_memory_bytes,
    argMax(s.device_memory_total_bytes, sampled_at) AS device_memory_total_bytes,
    toString(argMax(s.device_per_hour, sampled_at)) AS device_per_hour,
    argMax(s.currency, sampled_at) AS currency,
    max(s.sampled_at) AS latest_at
FROM worker_samples AS s FINAL
WHERE sampled_at > now64(6) - toIntervalSecond(45)
  AND ({model:String} = '' OR s.model = {model:String})
GROUP BY worker
HAVING max(s.sampled_at) > now64(6) - toIntervalSecond(15)
    OR argMax(s.num_running + s.num_waiting + s.busy_us, s.sampled_at) = 0
ORDER BY name
