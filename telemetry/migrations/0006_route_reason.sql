-- Why a request that left the choice of its model got the one that served it; empty for one that
-- named its model. A view keeps the columns that its table had when it was made.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS route_reason LowCardinality(String) DEFAULT '' AFTER model_served;

CREATE OR REPLACE VIEW requests_once AS
SELECT * FROM requests FINAL;
