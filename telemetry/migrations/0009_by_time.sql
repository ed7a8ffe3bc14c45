-- Rows in the order of their time, so that a question about a range reads little more than the
-- range, and FINAL has little to merge. A request is who asked when: received_at is fixed once,
-- before anybody works on it, and each of its records has the same, so a second record still
-- merges with the first. A sample's identity is what it was.
-- A rebuilt table is a copy that takes the other's place; cut short, it begins again. Meanwhile
-- another process may go on storing rows, or begin to rebuild, too: so whatever goes has all its
-- rows put into what stays first, where those that are there already merge.
SELECT throwIf(count() > 0, 'another process rebuilds tables, try again when it is done')
FROM system.processes
WHERE current_database = currentDatabase() AND startsWith(query, 'INSERT INTO') AND query LIKE '%_rebuilt%';

CREATE TABLE IF NOT EXISTS requests_rebuilt AS requests;

INSERT INTO requests SELECT * FROM requests_rebuilt;

DROP TABLE requests_rebuilt;

CREATE TABLE requests_rebuilt AS requests
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (toStartOfMinute(received_at), request_id)
TTL toDateTime(done_at) + INTERVAL 400 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

ALTER TABLE requests_rebuilt
    ADD INDEX IF NOT EXISTS request_id_in request_id TYPE bloom_filter(0.001) GRANULARITY 1;

INSERT INTO requests_rebuilt SELECT * FROM requests;

SELECT throwIf(NOT startsWith(sorting_key, 'toStartOfMinute'), 'another process has rebuilt requests')
FROM system.tables
WHERE database = currentDatabase() AND name = 'requests_rebuilt';

EXCHANGE TABLES requests AND requests_rebuilt;

INSERT INTO requests SELECT * FROM requests_rebuilt;

DROP TABLE requests_rebuilt;

CREATE TABLE IF NOT EXISTS worker_samples_rebuilt AS worker_samples;

INSERT INTO worker_samples SELECT * FROM worker_samples_rebuilt;

DROP TABLE worker_samples_rebuilt;

CREATE TABLE worker_samples_rebuilt AS worker_samples
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (sampled_at, worker)
TTL toDateTime(sampled_at) + INTERVAL 14 DAY DELETE WHERE sampled_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000;

INSERT INTO worker_samples_rebuilt SELECT * FROM worker_samples;

SELECT throwIf(NOT startsWith(sorting_key, 'sampled_at'), 'another process has rebuilt worker_samples')
FROM system.tables
WHERE database = currentDatabase() AND name = 'worker_samples_rebuilt';

EXCHANGE TABLES worker_samples AND worker_samples_rebuilt;

INSERT INTO worker_samples SELECT * FROM worker_samples_rebuilt;

DROP TABLE worker_samples_rebuilt;
