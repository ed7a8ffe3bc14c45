-- Joules beside device time, where a worker can read a counter. NULL: nobody measured, which a row of
-- the time before says as well. Of usage, energy_j is the sum of the energy_requests that have it.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS energy_j Nullable(Float64) AFTER device_cost;

ALTER TABLE worker_samples
    ADD COLUMN IF NOT EXISTS energy_j Nullable(Float64) AFTER charged_us,
    ADD COLUMN IF NOT EXISTS charged_j Nullable(Float64) AFTER energy_j;

ALTER TABLE usage_by_minute
    ADD COLUMN IF NOT EXISTS energy_j Nullable(Float64) AFTER device_cost,
    ADD COLUMN IF NOT EXISTS energy_requests UInt64 DEFAULT 0 AFTER energy_j,
    ADD COLUMN IF NOT EXISTS energy_tokens UInt64 DEFAULT 0 AFTER energy_requests;

ALTER TABLE workers_by_minute
    ADD COLUMN IF NOT EXISTS energy_j Nullable(Float64) AFTER idle_us,
    ADD COLUMN IF NOT EXISTS charged_j Nullable(Float64) AFTER energy_j;

CREATE OR REPLACE VIEW requests_once AS
SELECT * FROM requests FINAL;

CREATE OR REPLACE VIEW worker_samples_once AS
SELECT * FROM worker_samples FINAL;

CREATE OR REPLACE VIEW usage_by_minute_once AS
SELECT * FROM usage_by_minute FINAL;

CREATE OR REPLACE VIEW workers_by_minute_once AS
SELECT * FROM workers_by_minute FINAL;
