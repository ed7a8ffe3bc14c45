-- What was used in each minute, by who used it: computed from requests FINAL again and again for
-- the minutes that new rows touched, so it never counts a row twice. A group that is no longer
-- there is_deleted. fingerprint is that of the rows that were counted: where it differs from that
-- of the rows that are there, a minute is computed again. model is the one that served, or the one
-- that was asked for. Latencies are in ms; itl is tpot, weighed by the tokens that it is the mean of.
CREATE TABLE IF NOT EXISTS usage_by_minute
(
    minute            DateTime('UTC'),
    tenant            LowCardinality(String),
    user              String,
    model             LowCardinality(String),
    adapter           LowCardinality(String),
    source            LowCardinality(String),
    tier              LowCardinality(String),
    currency          LowCardinality(String),
    price_version     LowCardinality(String),
    requests          UInt64,
    done              UInt64,
    cancelled         UInt64,
    expired           UInt64,
    shed              UInt64,
    failed            UInt64,
    prompt_tokens     UInt64,
    cached_tokens     UInt64,
    completion_tokens UInt64,
    cost              Decimal(38, 12),
    device_us         UInt64,
    device_cost       Decimal(38, 12),
    num_preemptions   UInt64,
    num_moves         UInt64,
    queue_ms          AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)),
    ttft_ms           AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)),
    tpot_ms           AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)),
    itl_ms            AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Nullable(Float64), UInt32),
    total_ms          AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)),
    fingerprint       UInt64,
    version           UInt64,
    is_deleted        UInt8
)
ENGINE = ReplacingMergeTree(version, is_deleted)
ORDER BY (minute, tenant, user, model, adapter, source, tier, currency, price_version)
TTL minute + INTERVAL 1830 DAY DELETE WHERE minute > toDateTime('2000-01-01', 'UTC');

CREATE OR REPLACE VIEW usage_by_minute_once AS
SELECT * FROM usage_by_minute FINAL;
