-- For WITH: the range of steps.sql for samples of workers.
-- Steps of a minute or more are of whole minutes.
-- param to_s: end of the range, not included; up to 0: before now (default 0)
-- param step_s: the length of a step (default 60)
toInt64(toUnixTimestamp(now())) AS now_s,
toInt64({step_s:UInt32}) AS step_s,
if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS first_s,
if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS last_s,
if(step_s < 60, first_s, intDiv(first_s, 60) * 60) AS begin_s,
if(step_s < 60 AND last_s >= now_s, intDiv(now_s, step_s) * step_s, last_s) AS end_s
