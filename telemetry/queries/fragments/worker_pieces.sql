-- For FROM: samples of workers in steps shorter than a minute.
-- An idle period counts in each step that it covers.
-- param model: only this model's (default '')
SELECT
    *,
    if(busy_us = 0 AND num_running = 0, period_ms / 1000 / step_s, 1) AS lasted,
    toInt64(greatest(round(lasted), 1)) AS num_pieces,
    arrayJoin(range(num_pieces)) AS piece
FROM worker_samples FINAL
WHERE step_s < 60
  AND sampled_at >= toDateTime64(begin_s, 6, 'UTC')
  AND sampled_at < toDateTime64(end_s, 6, 'UTC') + toIntervalSecond(30)
  AND ({model:String} = '' OR model = {model:String})
