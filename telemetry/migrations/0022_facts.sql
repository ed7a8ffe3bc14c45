-- What is unknown is NULL in rows from here on; rows of before keep their 0.
ALTER TABLE deliveries
    MODIFY COLUMN first_byte_ms Nullable(Float64) DEFAULT NULL,
    MODIFY COLUMN intake_ms Nullable(Float64) DEFAULT NULL,
    MODIFY COLUMN longest_gap_ms Nullable(Float64) DEFAULT NULL;

ALTER TABLE worker_samples
    MODIFY COLUMN num_blocks Nullable(UInt32) DEFAULT NULL,
    MODIFY COLUMN num_free_blocks Nullable(UInt32) DEFAULT NULL,
    MODIFY COLUMN step_ms_mean Nullable(Float64) DEFAULT NULL,
    MODIFY COLUMN device_share Nullable(Float64) DEFAULT NULL,
    MODIFY COLUMN device_memory_bytes Nullable(UInt64) DEFAULT NULL,
    MODIFY COLUMN device_memory_total_bytes Nullable(UInt64) DEFAULT NULL;

ALTER TABLE workers_by_minute
    MODIFY COLUMN device_share_ms Nullable(Float64) DEFAULT NULL,
    MODIFY COLUMN device_memory_bytes Nullable(UInt64) DEFAULT NULL,
    MODIFY COLUMN device_memory_total_bytes Nullable(UInt64) DEFAULT NULL;

-- How a request was asked, and the tools that its answer called.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS api LowCardinality(String) DEFAULT '',
    ADD COLUMN IF NOT EXISTS stream Nullable(Bool) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS max_tokens Nullable(UInt32) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS deadline_at Nullable(DateTime64(6, 'UTC')) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS called_tools Array(LowCardinality(String)),
    ADD COLUMN IF NOT EXISTS num_tool_calls UInt32 DEFAULT 0;

-- The losses of workers, one row for each part that saw one.
CREATE TABLE IF NOT EXISTS worker_losses
(
    worker LowCardinality(String),
    name LowCardinality(String),
    model LowCardinality(String),
    lost_at DateTime64(6, 'UTC'),
    cause LowCardinality(String),
    detail LowCardinality(String),
    observer LowCardinality(String),
    num_requests UInt32,
    record_version UInt16,
    outbox_sequence UInt64
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (lost_at, worker, observer)
TTL toDateTime(lost_at) + INTERVAL 400 DAY DELETE WHERE lost_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

ALTER TABLE generation_rows
    ADD COLUMN IF NOT EXISTS api LowCardinality(String) DEFAULT '',
    ADD COLUMN IF NOT EXISTS stream Nullable(Bool) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS max_tokens Nullable(UInt32) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS deadline_at Nullable(DateTime64(6, 'UTC')) DEFAULT NULL,
    ADD COLUMN IF NOT EXISTS called_tools Array(LowCardinality(String)),
    ADD COLUMN IF NOT EXISTS num_tool_calls UInt32 DEFAULT 0;
