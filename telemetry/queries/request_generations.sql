-- Generations of one request: choices or inputs, rounds of server tools, attempts at a batch's line.
-- They add up to the request. One row for a request with a single generation; no row for an unknown
-- id.
-- param id: the request's id
SELECT
    generation_id,
    choice,
    round,
    attempt,
    model_served,
    worker,
    status,
    finish_reason,
    error_code,
    prompt_tokens,
    cached_tokens,
    completion_tokens,
    queue_ms,
    ttft_ms,
    tpot_ms,
    total_ms,
    toString(g.cost) AS cost,
    currency,
    device_us,
    toString(g.device_cost) AS device_cost,
    energy_j,
    epoch,
    length(lives) AS num_lives,
    done_at
FROM generations AS g
WHERE request_id = {id:String}
ORDER BY attempt, choice, round
