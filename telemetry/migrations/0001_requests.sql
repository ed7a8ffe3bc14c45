-- One row for each finished request. A request's second record, however it came about, merges
-- with the first: the key is the request alone, and the later place in the outbox wins.
-- NULL means that the request did not get so far: no first token, no TTFT.
-- A row without a time is kept: the TTL is for old rows, not for incomplete ones.
CREATE TABLE IF NOT EXISTS requests
(
    request_id        String,
    tenant            LowCardinality(String),
    user              String,
    session           String,
    source            LowCardinality(String),
    tier              LowCardinality(String),
    model_requested   LowCardinality(String),
    model_served      LowCardinality(String),
    worker            LowCardinality(String),
    adapter           LowCardinality(String),
    prompt_tokens     UInt32,
    cached_tokens     UInt32,
    completion_tokens UInt32,
    queue_ms          Nullable(Float64),
    ttft_ms           Nullable(Float64),
    tpot_us           Nullable(Float64),
    total_ms          Float64,
    finish_reason     LowCardinality(String),
    status            LowCardinality(String),
    error_code        LowCardinality(String),
    cost              Decimal(38, 12),
    currency          LowCardinality(String),
    price_version     LowCardinality(String),
    received_at       DateTime64(6, 'UTC'),
    started_at        Nullable(DateTime64(6, 'UTC')),
    first_token_at    Nullable(DateTime64(6, 'UTC')),
    done_at           DateTime64(6, 'UTC'),
    epoch             UInt32,
    num_preemptions   UInt32,
    record_version    UInt16,
    outbox_sequence   UInt64,
    INDEX received_at_range received_at TYPE minmax GRANULARITY 1,
    INDEX done_at_range done_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY request_id
TTL toDateTime(done_at) + INTERVAL 400 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;
