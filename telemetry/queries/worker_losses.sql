-- Lost workers, the latest first, with the cause: from the process keeper, else from a scheduler.
-- The loss of a worker's engine alone, after which the worker started another engine, is a separate
-- row.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param model: only this model's (default '')
WITH
    {{range}},
    (observer = 'process_keeper', w.lost_at) AS knowledge
SELECT
    max(w.lost_at) AS at,
    worker,
    any(w.name) AS name,
    any(w.model) AS model,
    argMax(w.cause, knowledge) AS cause,
    argMax(w.detail, knowledge) AS detail,
    max(w.num_requests) AS requests,
    arrayStringConcat(arraySort(groupUniqArray(w.observer)), ', ') AS observers
FROM worker_losses AS w FINAL
WHERE lost_at >= toDateTime64(begin_s, 6, 'UTC')
  AND lost_at < toDateTime64(end_s, 6, 'UTC')
  AND ({model:String} = '' OR w.model = {model:String})
GROUP BY worker, if(observer = 'worker', toUnixTimestamp64Micro(w.lost_at), 0)
ORDER BY at DESC, worker
