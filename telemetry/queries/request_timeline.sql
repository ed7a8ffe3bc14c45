-- Events of one request in order of time: its place, and the time until the next event.
-- choice, round and attempt identify the generation of an event, each 0 for a request with one. Times
-- of a delivery are the gateway's, whose clock may differ slightly from a worker's.
-- param id: the request's id
SELECT
    event,
    at,
    run,
    place,
    detail,
    device_us,
    choice,
    round,
    attempt
FROM
(
    SELECT 1 AS rank, 'received' AS event, received_at AS at, toUInt32(0) AS run, '' AS place, source AS detail, toUInt64(0) AS device_us, toUInt32(0) AS choice, toUInt32(0) AS round, toUInt32(0) AS attempt
    FROM requests FINAL WHERE request_id = {id:String}
    UNION ALL
    SELECT 2, 'started', assumeNotNull(life.started_at), life.epoch, life.worker, '', toUInt64(0), choice, round, attempt
    FROM (SELECT arrayJoin(lives) AS life, choice, round, attempt FROM generations WHERE request_id = {id:String})
    WHERE isNotNull(life.started_at)
    UNION ALL
    SELECT 3, 'interrupted', assumeNotNull(life.ended_at), life.epoch, life.worker, '', life.device_us, choice, round, attempt
    FROM (SELECT arrayJoin(lives) AS life, choice, round, attempt FROM generations WHERE request_id = {id:String})
    WHERE isNotNull(life.ended_at)
    UNION ALL
    SELECT 4, 'dispatched', assumeNotNull(dispatched_at), epoch, worker, '', toUInt64(0), choice, round, attempt
    FROM generations WHERE request_id = {id:String} AND isNotNull(dispatched_at)
    UNION ALL
    SELECT 5, 'started', assumeNotNull(started_at), epoch, worker, '', toUInt64(0), choice, round, attempt
    FROM generations WHERE request_id = {id:String} AND isNotNull(started_at)
    UNION ALL
    SELECT 6, 'first_token', assumeNotNull(first_token_at), epoch, worker, '', toUInt64(0), choice, round, attempt
    FROM generations WHERE request_id = {id:String} AND isNotNull(first_token_at)
    UNION ALL
    SELECT 7, 'ended', done_at, epoch, worker, status, device_us, choice, round, attempt
    FROM generations WHERE request_id = {id:String}
    UNION ALL
    SELECT 8, 'first_byte', addMicroseconds(done_at, toInt64((first_byte_ms - total_ms) * 1000)), 0, gateway, '', toUInt64(0), toUInt32(0), toUInt32(0), toUInt32(0)
    FROM deliveries FINAL WHERE request_id = {id:String} AND first_byte_ms > 0
    UNION ALL
    SELECT 9, 'delivered', done_at, 0, gateway, outcome, toUInt64(0), toUInt32(0), toUInt32(0), toUInt32(0)
    FROM deliveries FINAL WHERE request_id = {id:String}
)
ORDER BY at, rank
