-- What workers did in each minute, computed from worker_samples FINAL as usage_by_minute is from
-- requests, and kept after the samples are gone. A sample counts in the minute in which its period
-- ended. What is sampled is summed up over time: divide by period_ms for the mean.
CREATE TABLE IF NOT EXISTS workers_by_minute
(
    minute              DateTime('UTC'),
    model               LowCardinality(String),
    worker              LowCardinality(String),
    currency            LowCardinality(String),
    device_per_hour     Decimal(38, 12),
    name                LowCardinality(String),
    device_name         LowCardinality(String),
    samples             UInt64,
    period_ms           Float64,
    busy_us             UInt64,
    charged_us          UInt64,
    idle_us             UInt64,
    num_steps           UInt64,
    steps_ms            Float64,
    prefill_tokens      UInt64,
    decode_tokens       UInt64,
    num_preemptions     UInt64,
    prefix_query_tokens UInt64,
    prefix_hit_tokens   UInt64,
    running_ms          Float64,
    waiting_ms          Float64,
    queued_ms           Float64,
    most_queued         UInt32,
    blocks_ms           Float64,
    used_blocks_ms      Float64,
    device_share_ms     Float64,
    device_memory_bytes UInt64,
    device_memory_total_bytes UInt64,
    fingerprint         UInt64,
    version             UInt64,
    is_deleted          UInt8
)
ENGINE = ReplacingMergeTree(version, is_deleted)
ORDER BY (minute, model, worker, currency, device_per_hour)
TTL minute + INTERVAL 400 DAY DELETE WHERE minute > toDateTime('2000-01-01', 'UTC');

CREATE OR REPLACE VIEW workers_by_minute_once AS
SELECT * FROM workers_by_minute FINAL;
