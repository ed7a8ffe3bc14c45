-- What the client of a request really saw, as the gateway that held its stream measured it.
CREATE TABLE IF NOT EXISTS deliveries
(
    request_id       String,
    gateway          LowCardinality(String),
    tenant           LowCardinality(String),
    source           LowCardinality(String),
    first_byte_ms    Float64,
    total_ms         Float64,
    tokens_delivered UInt32,
    num_replays      UInt32,
    num_epochs       UInt32,
    outcome          LowCardinality(String),
    done_at          DateTime64(6, 'UTC'),
    record_version   UInt16,
    outbox_sequence  UInt64,
    INDEX done_at_range done_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY request_id
TTL toDateTime(done_at) + INTERVAL 90 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;
