-- Tenants with the most ended requests in the range, the busiest first: requests, tokens, TTFT.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -60)
-- param rows: number of rows, at most 1000 (default 50)
WITH
    {{range}}
SELECT
    tenant,
    count() AS requests,
    countIf(status != 'done') AS other,
    sum(prompt_tokens) AS prompt_tokens,
    sum(completion_tokens) AS completion_tokens,
    quantileTDigestOrNull(0.95)(ttft_ms) AS ttft_p95_ms
FROM requests FINAL
WHERE done_at >= toDateTime64(begin_s, 6, 'UTC')
  AND done_at < toDateTime64(end_s, 6, 'UTC')
GROUP BY tenant
ORDER BY requests DESC, tenant
LIMIT {rows:UInt32}
