-- The ids of more than the first of several equal refusals, and what the gateway did with a request
-- before it was received. A row of the time before has the first id alone, and an intake of nothing.
ALTER TABLE refusals
    ADD COLUMN IF NOT EXISTS request_ids Array(String) DEFAULT if(request_id = '', [], [request_id]) AFTER request_id;

ALTER TABLE deliveries
    ADD COLUMN IF NOT EXISTS intake_ms Float64 DEFAULT 0 AFTER longest_gap_ms;

CREATE OR REPLACE VIEW refusals_once AS
SELECT * FROM refusals FINAL;

CREATE OR REPLACE VIEW deliveries_once AS
SELECT * FROM deliveries FINAL;
