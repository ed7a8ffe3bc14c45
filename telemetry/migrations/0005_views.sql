-- Each request once, also before its duplicates have merged: the same as requests FINAL, for tools
-- that cannot say FINAL.
CREATE VIEW IF NOT EXISTS requests_once AS
SELECT * FROM requests FINAL;

CREATE VIEW IF NOT EXISTS deliveries_once AS
SELECT * FROM deliveries FINAL;

CREATE VIEW IF NOT EXISTS worker_samples_once AS
SELECT * FROM worker_samples FINAL;
