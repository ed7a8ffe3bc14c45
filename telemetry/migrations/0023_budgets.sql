-- The monthly budgets of tenants and API keys, a row for each change. There is no TTL.
CREATE TABLE IF NOT EXISTS budgets
(
    tenant LowCardinality(String),
    key_id String,
    currency LowCardinality(String),
    monthly_budget Nullable(Decimal(38, 12)) DEFAULT NULL,
    valid_from DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree
ORDER BY (tenant, key_id, currency, valid_from);
