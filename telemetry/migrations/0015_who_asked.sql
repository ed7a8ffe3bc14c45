-- Which API key asked, and what its client noted on the request (OpenAI's metadata). Empty in rows of
-- the time before, and where there is no key or nothing was noted. Usage is told apart by key from
-- now on: a minute that was counted before has the key ''.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS key_id LowCardinality(String) DEFAULT '' AFTER tenant,
    ADD COLUMN IF NOT EXISTS metadata Map(LowCardinality(String), String) AFTER session;

ALTER TABLE usage_by_minute
    ADD COLUMN IF NOT EXISTS key_id LowCardinality(String) AFTER price_version,
    MODIFY ORDER BY (minute, tenant, user, model, adapter, source, tier, currency, price_version, key_id);

ALTER TABLE refusals
    ADD COLUMN IF NOT EXISTS key_id LowCardinality(String) ALIAS api_key AFTER tenant;

CREATE OR REPLACE VIEW requests_once AS
SELECT * FROM requests FINAL;

CREATE OR REPLACE VIEW usage_by_minute_once AS
SELECT * FROM usage_by_minute FINAL;

CREATE OR REPLACE VIEW refusals_once AS
SELECT *, key_id FROM refusals FINAL;
