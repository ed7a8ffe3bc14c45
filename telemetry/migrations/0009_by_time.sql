-- Rows in the order of their time, so that a question about a range reads little more than the
-- range, and FINAL has little to merge. A request is who asked when: received_at is fixed once,
-- before anybody works on it, and each of its records has the same, so a second record still
-- merges with the first. A sample's identity is what it was.
-- A rebuilt table is a copy that takes the other's place; cut short, it begins again.
DROP TABLE IF EXISTS requests_rebuilt;

CREATE TABLE requests_rebuilt AS requests
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (toStartOfMinute(received_at), request_id)
TTL toDateTime(done_at) + INTERVAL 400 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

ALTER TABLE requests_rebuilt
    ADD INDEX IF NOT EXISTS request_id_in request_id TYPE bloom_filter(0.001) GRANULARITY 1;

INSERT INTO requests_rebuilt SELECT * FROM requests;

EXCHANGE TABLES requests AND requests_rebuilt;

DROP TABLE requests_rebuilt;

DROP TABLE IF EXISTS worker_samples_rebuilt;

CREATE TABLE worker_samples_rebuilt AS worker_samples
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (sampled_at, worker)
TTL toDateTime(sampled_at) + INTERVAL 14 DAY DELETE WHERE sampled_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

INSERT INTO worker_samples_rebuilt SELECT * FROM worker_samples;

EXCHANGE TABLES worker_samples AND worker_samples_rebuilt;

DROP TABLE worker_samples_rebuilt;
