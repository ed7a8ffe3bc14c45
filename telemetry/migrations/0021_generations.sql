-- A row of requests is an accepted request. One that has several generations (choices, inputs, rounds of
-- server tools, attempts at a line of a batch) is made of their rows, which are in generation_rows. Rows
-- of requests that are not whole are made so.
ALTER TABLE requests ADD COLUMN IF NOT EXISTS batch_id String DEFAULT '';
ALTER TABLE requests ADD COLUMN IF NOT EXISTS num_generations UInt32 DEFAULT 1;
ALTER TABLE requests ADD COLUMN IF NOT EXISTS is_whole Bool DEFAULT true;

CREATE TABLE IF NOT EXISTS generation_rows
(
    request_id String,
    generation_id String,
    choice UInt32,
    round UInt32,
    attempt UInt32,
    batch_id String DEFAULT '',
    tenant LowCardinality(String),
    key_id LowCardinality(String) DEFAULT '',
    user String,
    session String,
    metadata Map(LowCardinality(String), String),
    source LowCardinality(String),
    tier LowCardinality(String),
    model_requested LowCardinality(String),
    model_served LowCardinality(String),
    route_reason LowCardinality(String) DEFAULT '',
    worker LowCardinality(String),
    adapter LowCardinality(String),
    prompt_tokens UInt32,
    cached_tokens UInt32,
    completion_tokens UInt32,
    queue_ms Nullable(Float64),
    ttft_ms Nullable(Float64),
    tpot_ms Nullable(Float64) ALIAS tpot_us / 1000,
    tpot_us Nullable(Float64),
    total_ms Float64,
    finish_reason LowCardinality(String),
    status LowCardinality(String),
    error_code LowCardinality(String),
    cost Decimal(38, 12),
    device_us UInt64 DEFAULT 0,
    device_cost Decimal(38, 12) DEFAULT 0,
    energy_j Nullable(Float64),
    currency LowCardinality(String),
    price_version LowCardinality(String),
    received_at DateTime64(6, 'UTC'),
    dispatched_at Nullable(DateTime64(6, 'UTC')),
    started_at Nullable(DateTime64(6, 'UTC')),
    first_token_at Nullable(DateTime64(6, 'UTC')),
    done_at DateTime64(6, 'UTC'),
    epoch UInt32,
    lives Array(Tuple(epoch UInt32, worker String, started_at Nullable(DateTime64(6, 'UTC')), ended_at Nullable(DateTime64(6, 'UTC')), device_us UInt64)),
    trace_id String DEFAULT '',
    cost_method LowCardinality(String) DEFAULT 'steps',
    resampled Bool DEFAULT false,
    proposed_tokens UInt32 DEFAULT 0,
    accepted_tokens UInt32 DEFAULT 0,
    pulled_tokens UInt32 DEFAULT 0,
    kv_source LowCardinality(String) DEFAULT '',
    pulls Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32)),
    num_devices UInt32 DEFAULT 1,
    num_preemptions UInt32,
    record_version UInt16,
    outbox_sequence UInt64,
    INDEX done_at_range done_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (request_id, generation_id)
TTL toDateTime(done_at) + INTERVAL 400 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;
