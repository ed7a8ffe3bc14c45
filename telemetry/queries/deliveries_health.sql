-- Deliveries as clients saw them, by model and interface.
-- Time to the first byte, tokens delivered, resumes, replays and stalls (gaps of a second or more
-- between two deliveries of tokens).
-- param from_s: begin of the range, Unix time; up to 0: before now (default -86400)
-- param tenant: only this tenant's (default '')
-- param model: only this model's (default '')
WITH
    {{range}}
SELECT
    model,
    source,
    count() AS deliveries,
    countIf(outcome = 'done') AS done,
    sum(d.tokens_delivered) AS tokens_delivered,
    quantileTDigest(0.5)(d.first_byte_ms) AS first_byte_p50_ms,
    quantileTDigest(0.95)(d.first_byte_ms) AS first_byte_p95_ms,
    quantileTDigest(0.99)(d.first_byte_ms) AS first_byte_p99_ms,
    quantileTDigest(0.95)(d.longest_gap_ms) AS longest_gap_p95_ms,
    max(d.longest_gap_ms) AS longest_gap_ms,
    countIf(d.num_stalls > 0) AS stalled,
    sum(d.num_stalls) AS stalls,
    sum(d.stalled_ms) AS stalled_ms,
    countIf(d.num_resumes > 0) AS resumed,
    sum(d.num_resumes) AS resumes,
    sum(d.num_replays) AS replays,
    countIf(d.num_epochs > 1) AS moved
FROM deliveries AS d FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
  AND ({tenant:String} = '' OR tenant = {tenant:String})
  AND ({model:String} = '' OR model = {model:String})
GROUP BY model, source
ORDER BY model, source
