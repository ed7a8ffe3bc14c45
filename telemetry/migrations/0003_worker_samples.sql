-- A worker's state over one sampling period that ended at sampled_at.
CREATE TABLE IF NOT EXISTS worker_samples
(
    worker          LowCardinality(String),
    name            LowCardinality(String),
    model           LowCardinality(String),
    sampled_at      DateTime64(6, 'UTC'),
    period_ms       Float64,
    num_running     UInt32,
    num_waiting     UInt32,
    num_blocks      UInt32,
    num_free_blocks UInt32,
    num_steps       UInt32,
    step_ms_mean    Float64,
    busy_share      Float64,
    prefill_tokens  UInt32,
    decode_tokens   UInt32,
    num_preemptions UInt32,
    queue_depth     UInt32,
    record_version  UInt16,
    outbox_sequence UInt64,
    INDEX sampled_at_range sampled_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (worker, sampled_at)
TTL toDateTime(sampled_at) + INTERVAL 14 DAY DELETE WHERE sampled_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;
