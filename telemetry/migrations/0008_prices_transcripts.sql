-- What tokens and devices cost, by the version of the price book that a request's row names. A
-- version names its prices for ever: a row is never changed, and there is no TTL.
CREATE TABLE IF NOT EXISTS prices
(
    model                    LowCardinality(String),
    version                  String,
    currency                 LowCardinality(String),
    input_per_million        Decimal(38, 12),
    cached_input_per_million Decimal(38, 12),
    output_per_million       Decimal(38, 12),
    device_per_hour          Decimal(38, 12),
    first_seen               DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree
ORDER BY (model, version);

-- The words of prompts and answers, only of tenants that asked for them to be kept, for 30 days. A
-- row without a time, or with one that is still to come, is kept for 30 days from when it came.
CREATE TABLE IF NOT EXISTS transcripts
(
    request_id      String,
    tenant          LowCardinality(String),
    model           LowCardinality(String),
    prompt          String CODEC(ZSTD(3)),
    completion      String CODEC(ZSTD(3)),
    done_at         DateTime64(6, 'UTC'),
    record_version  UInt16,
    outbox_sequence UInt64,
    stored_at       DateTime('UTC') DEFAULT now()
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY request_id
TTL if(done_at > toDateTime64('2000-01-01', 6, 'UTC'), least(toDateTime(done_at, 'UTC'), stored_at), stored_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 1000;

CREATE OR REPLACE VIEW transcripts_once AS
SELECT * FROM transcripts FINAL;
