-- What requests cost us beside what they cost their tenants, what clients saw of stalls, and what
-- devices did. A row of the time before has what the defaults say: nothing was measured.

-- device_us is the request's share of the time that devices were busy, of all its runs; lives are
-- the runs before the one that ended it. NULL: it never came to that, or nobody can tell any more.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS dispatched_at Nullable(DateTime64(6, 'UTC')) AFTER received_at,
    ADD COLUMN IF NOT EXISTS device_us UInt64 DEFAULT 0 AFTER cost,
    ADD COLUMN IF NOT EXISTS device_cost Decimal(38, 12) DEFAULT 0 AFTER device_us,
    ADD COLUMN IF NOT EXISTS lives Array(Tuple(epoch UInt32, worker String, started_at Nullable(DateTime64(6, 'UTC')), ended_at Nullable(DateTime64(6, 'UTC')), device_us UInt64)) AFTER epoch,
    ADD COLUMN IF NOT EXISTS trace_id String DEFAULT '' AFTER lives;

ALTER TABLE deliveries
    ADD COLUMN IF NOT EXISTS model LowCardinality(String) DEFAULT '' AFTER source,
    ADD COLUMN IF NOT EXISTS num_resumes UInt32 DEFAULT 0 AFTER num_epochs,
    ADD COLUMN IF NOT EXISTS num_stalls UInt32 DEFAULT 0 AFTER num_resumes,
    ADD COLUMN IF NOT EXISTS stalled_ms Float64 DEFAULT 0 AFTER num_stalls,
    ADD COLUMN IF NOT EXISTS longest_gap_ms Float64 DEFAULT 0 AFTER stalled_ms;

-- Of period_ms the device was busy for busy_us, of which requests were charged charged_us. What
-- its driver says is 0 where there is none to ask.
ALTER TABLE worker_samples
    ADD COLUMN IF NOT EXISTS busy_us UInt64 DEFAULT 0 AFTER busy_share,
    ADD COLUMN IF NOT EXISTS charged_us UInt64 DEFAULT 0 AFTER busy_us,
    ADD COLUMN IF NOT EXISTS prefix_query_tokens UInt32 DEFAULT 0 AFTER queue_depth,
    ADD COLUMN IF NOT EXISTS prefix_hit_tokens UInt32 DEFAULT 0 AFTER prefix_query_tokens,
    ADD COLUMN IF NOT EXISTS device_name LowCardinality(String) DEFAULT '' AFTER prefix_hit_tokens,
    ADD COLUMN IF NOT EXISTS device_share Float64 DEFAULT 0 AFTER device_name,
    ADD COLUMN IF NOT EXISTS device_memory_bytes UInt64 DEFAULT 0 AFTER device_share,
    ADD COLUMN IF NOT EXISTS device_memory_total_bytes UInt64 DEFAULT 0 AFTER device_memory_bytes,
    ADD COLUMN IF NOT EXISTS device_per_hour Decimal(38, 12) DEFAULT 0 AFTER device_memory_total_bytes,
    ADD COLUMN IF NOT EXISTS currency LowCardinality(String) DEFAULT '' AFTER device_per_hour;

-- A view keeps the columns that its table had when it was made.
CREATE OR REPLACE VIEW requests_once AS
SELECT * FROM requests FINAL;

CREATE OR REPLACE VIEW deliveries_once AS
SELECT * FROM deliveries FINAL;

CREATE OR REPLACE VIEW worker_samples_once AS
SELECT * FROM worker_samples FINAL;
