-- For WITH: the range in Unix time, from begin_s up to, but not including, end_s.
-- param to_s: end of the range, not included; up to 0: before now (default 0)
toInt64(toUnixTimestamp(now())) AS now_s,
if({from_s:Int64} <= 0, now_s + {from_s:Int64}, {from_s:Int64}) AS begin_s,
if({to_s:Int64} <= 0, now_s + {to_s:Int64}, {to_s:Int64}) AS end_s
