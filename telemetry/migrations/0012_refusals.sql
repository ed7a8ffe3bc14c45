-- What gateways refused before it was a job: a row for each kind of refusal, gateway and second,
-- with how many requests it was. Who asked is empty where nobody knows; nothing that a client wrote
-- is in it.
CREATE TABLE IF NOT EXISTS refusals
(
    recorded_at     DateTime64(6, 'UTC'),
    gateway         LowCardinality(String),
    number          UInt32,
    tenant          LowCardinality(String),
    api_key         LowCardinality(String),
    door            LowCardinality(String),
    status          UInt16,
    code            LowCardinality(String),
    limit_reached   LowCardinality(String),
    requests        UInt32,
    first_at        DateTime64(6, 'UTC'),
    last_at         DateTime64(6, 'UTC'),
    request_id      String,
    record_version  UInt16,
    outbox_sequence UInt64
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (recorded_at, gateway, number)
TTL toDateTime(recorded_at) + INTERVAL 90 DAY DELETE WHERE recorded_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

CREATE OR REPLACE VIEW refusals_once AS
SELECT * FROM refusals FINAL;
