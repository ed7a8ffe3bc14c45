-- What engines that others wrote do not tell: their device time is shared by tokens, and a sampled
-- stream that goes on after a crash is drawn anew from there. A row of the time before is of engines
-- that measure their steps and draw the same again.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS cost_method LowCardinality(String) DEFAULT 'steps' AFTER trace_id,
    ADD COLUMN IF NOT EXISTS resampled Bool DEFAULT false AFTER cost_method;

CREATE OR REPLACE VIEW requests_once AS
SELECT * FROM requests FINAL;
