-- Totals of the range in one row: requests by status, tokens, latencies, prices, device time.
-- Percentiles, accurate to 1 %, cover the requests that got so far; E2E covers answered requests.
-- energy_j is of the energy_requests with a measurement, NULL if there are none. Money is exact, as
-- text: costs and device_costs have an amount for each of the currencies, in their order; so do the
-- lists of requests, output tokens and device time by currency.
-- param from_s: begin of the range, Unix time; up to 0: before now (default -900)
WITH
    {{range}}
SELECT
    sum(n) AS requests,
    sum(c.done) AS done,
    sum(c.cancelled) AS cancelled,
    sum(c.failed) AS failed,
    sum(c.expired) AS expired,
    sum(c.shed) AS shed,
    sum(c.moved) AS moved,
    sum(c.preemptions) AS preemptions,
    sum(c.prompt_tokens) AS prompt_tokens,
    sum(c.cached_tokens) AS cached_tokens,
    sum(c.completion_tokens) AS completion_tokens,
    sum(c.proposed_tokens) AS proposed_tokens,
    sum(c.accepted_tokens) AS accepted_tokens,
    sum(c.device_us) AS device_us,
    sum(c.energy_j) AS energy_j,
    sum(c.energy_requests) AS energy_requests,
    (arraySort(groupArray((
        c.currency, toString(c.cost), toString(c.device_cost),
        toString(c.n), toString(c.completion_tokens), toString(c.device_us)
    ))) AS money).1 AS currencies,
    money.2 AS costs,
    money.3 AS device_costs,
    money.4 AS currency_requests,
    money.5 AS currency_completion_tokens,
    money.6 AS currency_device_us,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.ttft)[1] AS ttft_p50_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.ttft)[2] AS ttft_p95_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.ttft)[3] AS ttft_p99_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.tpot)[1] AS tpot_p50_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.tpot)[2] AS tpot_p95_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.tpot)[3] AS tpot_p99_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.e2e)[1] AS e2e_p50_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.e2e)[2] AS e2e_p95_ms,
    quantilesBFloat16IfMerge(0.5, 0.95, 0.99)(c.e2e)[3] AS e2e_p99_ms
FROM
(
    SELECT
        currency,
        count() AS n,
        countIf(status = 'done') AS done,
        countIf(status = 'cancelled') AS cancelled,
        countIf(status = 'failed') AS failed,
        countIf(status = 'expired') AS expired,
        countIf(status = 'shed') AS shed,
        countIf(notEmpty(lives)) AS moved,
        sum(num_preemptions) AS preemptions,
        sum(requests.prompt_tokens) AS prompt_tokens,
        sum(requests.cached_tokens) AS cached_tokens,
        sum(requests.completion_tokens) AS completion_tokens,
        sum(requests.proposed_tokens) AS proposed_tokens,
        sum(requests.accepted_tokens) AS accepted_tokens,
        sum(requests.device_us) AS device_us,
        sumOrNull(requests.energy_j) AS energy_j,
        count(requests.energy_j) AS energy_requests,
        sum(requests.cost) AS cost,
        sum(requests.device_cost) AS device_cost,
        quantilesBFloat16IfState(0.5, 0.95, 0.99)(assumeNotNull(ttft_ms), isNotNull(ttft_ms)) AS ttft,
        quantilesBFloat16IfState(0.5, 0.95, 0.99)(assumeNotNull(tpot_ms), isNotNull(tpot_ms)) AS tpot,
        quantilesBFloat16IfState(0.5, 0.95, 0.99)(total_ms, status = 'done') AS e2e
    FROM requests FINAL
    WHERE {{requests_in_range}}
    GROUP BY currency
) AS c
