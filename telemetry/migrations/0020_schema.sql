-- The tables of an analytics store, and for each a view that ends in _once: the rows of its table FINAL,
-- for tools that cannot say FINAL. A view keeps the columns that its table had when it was made.
-- This file stands for migrations 1 to 20 of the versions before it, which made the same tables. It does
-- not change: a change of a table is a migration after it.

-- One row for each finished request. A request's second record merges with its first: the key holds
-- the request's id and received_at, which is fixed before a worker has the request, and the row with the
-- higher place in the outbox wins. NULL means that the request did not get so far: no first token,
-- no TTFT. Rows lie in the order of their time, so that a query of a range reads little more than the
-- range. The TTL is for old rows: a row without a time is kept.
-- A row that an older sink writes has the defaults of the columns that it does not know.
CREATE TABLE IF NOT EXISTS requests
(
    request_id String COMMENT 'The request''s id, as the client got it',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    key_id LowCardinality(String) DEFAULT '' COMMENT 'The id of the API key that asked; empty without one, and as its publisher says for a job that came over NATS',
    user String COMMENT 'The end user that the client named (`user`, `safety_identifier`, Anthropic''s `metadata.user_id`); empty if it named none',
    session String COMMENT 'The session (`session_id`); empty without one',
    metadata Map(LowCardinality(String), String) COMMENT 'What the client noted on the request (OpenAI''s `metadata`): up to 16 pairs of text',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    tier LowCardinality(String) COMMENT 'Service tier: enterprise, pro, free, batch',
    model_requested LowCardinality(String) COMMENT 'The model that was asked for; auto left the choice to the gateway',
    model_served LowCardinality(String) COMMENT 'The model that answered; empty if the request came to none',
    route_reason LowCardinality(String) DEFAULT '' COMMENT 'Why `auto` became this model; empty if the model was named',
    worker LowCardinality(String) COMMENT 'The worker that ended it; empty if none had it',
    adapter LowCardinality(String) COMMENT 'The LoRA adapter; empty for the model itself',
    prompt_tokens UInt32 COMMENT 'Tokens of the prompt, those from the cache included',
    cached_tokens UInt32 COMMENT 'Tokens of the prompt that were found in the prefix cache',
    completion_tokens UInt32 COMMENT 'Tokens that were generated',
    queue_ms Nullable(Float64) COMMENT 'Latency, ms: from receipt until a worker began; NULL if none did',
    ttft_ms Nullable(Float64) COMMENT 'Latency, ms: from receipt to the first token (TTFT); NULL without one',
    tpot_ms Nullable(Float64) ALIAS tpot_us / 1000 COMMENT 'Latency, ms: mean time per token after the first (TPOT); NULL below two tokens',
    tpot_us Nullable(Float64) COMMENT 'As stored: tpot_ms in us. Read tpot_ms',
    total_ms Float64 COMMENT 'Latency, ms: from receipt to the end (E2E)',
    finish_reason LowCardinality(String) COMMENT 'Why the answer ended: stop, length, tool_calls and so on; empty if it did not end by itself',
    status LowCardinality(String) COMMENT 'How it ended: done, cancelled, expired, shed, failed',
    error_code LowCardinality(String) COMMENT 'The stable code of the error, if it failed',
    cost Decimal(38, 12) COMMENT 'What the tenant pays, in `currency`',
    device_us UInt64 DEFAULT 0 COMMENT 'Device time, us: its share of the time that devices were busy, of all its attempts',
    device_cost Decimal(38, 12) DEFAULT 0 COMMENT 'What that device time cost us, in `currency`',
    energy_j Nullable(Float64) COMMENT 'Energy, J: its share of what counters counted while devices were busy; NULL unless all its attempts were measured',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    price_version LowCardinality(String) COMMENT 'The version of the price book that amounts were made by; empty if no worker had the request',
    received_at DateTime64(6, 'UTC') COMMENT 'When a gateway or scheduler received it, UTC',
    dispatched_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When it was sent to the worker that ended it, UTC; NULL if it never was',
    started_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When that worker began, UTC; NULL if none did',
    first_token_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When its first token was made, UTC; NULL without one',
    done_at DateTime64(6, 'UTC') COMMENT 'When it ended, UTC',
    epoch UInt32 COMMENT 'The number of the attempt that ended it, which rises with each',
    lives Array(Tuple(epoch UInt32, worker String, started_at Nullable(DateTime64(6, 'UTC')), ended_at Nullable(DateTime64(6, 'UTC')), device_us UInt64)) COMMENT 'The attempts before that one: epoch, worker, times in UTC, device time in us',
    trace_id String DEFAULT '' COMMENT 'The id of its distributed trace; empty if none was recorded',
    cost_method LowCardinality(String) DEFAULT 'steps' COMMENT 'How device_us is known: steps, or tokens for engines that do not tell',
    resampled Bool DEFAULT false COMMENT 'Whether it went on, after a crash, with tokens that its seed does not give',
    proposed_tokens UInt32 DEFAULT 0 COMMENT 'Tokens that were computed in case they should be the next, by the attempt that ended it',
    accepted_tokens UInt32 DEFAULT 0 COMMENT 'How many of proposed_tokens were the next, and so saved a step',
    pulled_tokens UInt32 DEFAULT 0 COMMENT 'Tokens of prompt and earlier attempts that came from other workers'' KV caches, of all its attempts',
    kv_source LowCardinality(String) DEFAULT '' COMMENT 'The worker that the last of pulled_tokens came from; empty if none did',
    pulls Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32)) COMMENT 'The attempts that pulled tokens, the last one included: epoch, worker that they came from, how many',
    num_devices UInt32 DEFAULT 1 COMMENT 'Devices that the worker which ended it computes on; device_us is of all of them together',
    num_preemptions UInt32 COMMENT 'Times that it was put back for want of KV blocks',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    INDEX received_at_range received_at TYPE minmax GRANULARITY 1,
    INDEX done_at_range done_at TYPE minmax GRANULARITY 1,
    INDEX request_id_in request_id TYPE bloom_filter(0.001) GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (toStartOfMinute(received_at), request_id)
TTL toDateTime(done_at) + INTERVAL 400 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'A request that ended, however it ended. Kept for 400 days.';

CREATE VIEW IF NOT EXISTS requests_once
(
    request_id String COMMENT 'The request''s id, as the client got it',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    key_id LowCardinality(String) COMMENT 'The id of the API key that asked; empty without one, and as its publisher says for a job that came over NATS',
    user String COMMENT 'The end user that the client named (`user`, `safety_identifier`, Anthropic''s `metadata.user_id`); empty if it named none',
    session String COMMENT 'The session (`session_id`); empty without one',
    metadata Map(LowCardinality(String), String) COMMENT 'What the client noted on the request (OpenAI''s `metadata`): up to 16 pairs of text',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    tier LowCardinality(String) COMMENT 'Service tier: enterprise, pro, free, batch',
    model_requested LowCardinality(String) COMMENT 'The model that was asked for; auto left the choice to the gateway',
    model_served LowCardinality(String) COMMENT 'The model that answered; empty if the request came to none',
    route_reason LowCardinality(String) COMMENT 'Why `auto` became this model; empty if the model was named',
    worker LowCardinality(String) COMMENT 'The worker that ended it; empty if none had it',
    adapter LowCardinality(String) COMMENT 'The LoRA adapter; empty for the model itself',
    prompt_tokens UInt32 COMMENT 'Tokens of the prompt, those from the cache included',
    cached_tokens UInt32 COMMENT 'Tokens of the prompt that were found in the prefix cache',
    completion_tokens UInt32 COMMENT 'Tokens that were generated',
    queue_ms Nullable(Float64) COMMENT 'Latency, ms: from receipt until a worker began; NULL if none did',
    ttft_ms Nullable(Float64) COMMENT 'Latency, ms: from receipt to the first token (TTFT); NULL without one',
    total_ms Float64 COMMENT 'Latency, ms: from receipt to the end (E2E)',
    finish_reason LowCardinality(String) COMMENT 'Why the answer ended: stop, length, tool_calls and so on; empty if it did not end by itself',
    status LowCardinality(String) COMMENT 'How it ended: done, cancelled, expired, shed, failed',
    error_code LowCardinality(String) COMMENT 'The stable code of the error, if it failed',
    cost Decimal(38, 12) COMMENT 'What the tenant pays, in `currency`',
    device_us UInt64 COMMENT 'Device time, us: its share of the time that devices were busy, of all its attempts',
    device_cost Decimal(38, 12) COMMENT 'What that device time cost us, in `currency`',
    energy_j Nullable(Float64) COMMENT 'Energy, J: its share of what counters counted while devices were busy; NULL unless all its attempts were measured',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    price_version LowCardinality(String) COMMENT 'The version of the price book that amounts were made by; empty if no worker had the request',
    received_at DateTime64(6, 'UTC') COMMENT 'When a gateway or scheduler received it, UTC',
    dispatched_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When it was sent to the worker that ended it, UTC; NULL if it never was',
    started_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When that worker began, UTC; NULL if none did',
    first_token_at Nullable(DateTime64(6, 'UTC')) COMMENT 'When its first token was made, UTC; NULL without one',
    done_at DateTime64(6, 'UTC') COMMENT 'When it ended, UTC',
    epoch UInt32 COMMENT 'The number of the attempt that ended it, which rises with each',
    lives Array(Tuple(epoch UInt32, worker String, started_at Nullable(DateTime64(6, 'UTC')), ended_at Nullable(DateTime64(6, 'UTC')), device_us UInt64)) COMMENT 'The attempts before that one: epoch, worker, times in UTC, device time in us',
    trace_id String COMMENT 'The id of its distributed trace; empty if none was recorded',
    cost_method LowCardinality(String) COMMENT 'How device_us is known: steps, or tokens for engines that do not tell',
    resampled Bool COMMENT 'Whether it went on, after a crash, with tokens that its seed does not give',
    proposed_tokens UInt32 COMMENT 'Tokens that were computed in case they should be the next, by the attempt that ended it',
    accepted_tokens UInt32 COMMENT 'How many of proposed_tokens were the next, and so saved a step',
    pulled_tokens UInt32 COMMENT 'Tokens of prompt and earlier attempts that came from other workers'' KV caches, of all its attempts',
    kv_source LowCardinality(String) COMMENT 'The worker that the last of pulled_tokens came from; empty if none did',
    pulls Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32)) COMMENT 'The attempts that pulled tokens, the last one included: epoch, worker that they came from, how many',
    num_devices UInt32 COMMENT 'Devices that the worker which ended it computes on; device_us is of all of them together',
    num_preemptions UInt32 COMMENT 'Times that it was put back for want of KV blocks',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    tpot_ms Nullable(Float64) COMMENT 'Latency, ms: mean time per token after the first (TPOT); NULL below two tokens'
)
COMMENT 'Each row of requests once, as requests FINAL has it.'
AS SELECT * EXCEPT (tpot_us), tpot_ms FROM requests FINAL;

-- What the client of a request saw, as measured by the gateway that held its stream.
CREATE TABLE IF NOT EXISTS deliveries
(
    request_id String COMMENT 'The request''s id, as the client got it',
    gateway LowCardinality(String) COMMENT 'The gateway that it was',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    model LowCardinality(String) DEFAULT '' COMMENT 'The model that answered',
    first_byte_ms Float64 COMMENT 'Latency, ms: from receipt to the first byte for the client; 0 if none was sent',
    total_ms Float64 COMMENT 'Latency, ms: from receipt to the end of the stream',
    tokens_delivered UInt32 COMMENT 'Tokens that were handed to the client',
    num_replays UInt32 COMMENT 'Times that tokens were asked for again from a worker',
    num_epochs UInt32 COMMENT 'Attempts whose tokens reached the client',
    num_resumes UInt32 DEFAULT 0 COMMENT 'Times that the client came back to its stream',
    num_stalls UInt32 DEFAULT 0 COMMENT 'Gaps of a second or more between two deliveries of tokens',
    stalled_ms Float64 DEFAULT 0 COMMENT 'All such gaps together, ms',
    longest_gap_ms Float64 DEFAULT 0 COMMENT 'The longest gap between two deliveries of tokens, ms',
    intake_ms Float64 DEFAULT 0 COMMENT 'Latency, ms: from the request at the gateway to its receipt',
    outcome LowCardinality(String) COMMENT 'How the stream ended: as `status` of requests, or disconnected',
    done_at DateTime64(6, 'UTC') COMMENT 'When the stream ended, UTC',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    INDEX done_at_range done_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY request_id
TTL toDateTime(done_at) + INTERVAL 90 DAY DELETE WHERE done_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'What the client of a request saw, as its gateway measured it. Kept for 90 days.';

CREATE VIEW IF NOT EXISTS deliveries_once
(
    request_id String COMMENT 'The request''s id, as the client got it',
    gateway LowCardinality(String) COMMENT 'The gateway that it was',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    model LowCardinality(String) COMMENT 'The model that answered',
    first_byte_ms Float64 COMMENT 'Latency, ms: from receipt to the first byte for the client; 0 if none was sent',
    total_ms Float64 COMMENT 'Latency, ms: from receipt to the end of the stream',
    tokens_delivered UInt32 COMMENT 'Tokens that were handed to the client',
    num_replays UInt32 COMMENT 'Times that tokens were asked for again from a worker',
    num_epochs UInt32 COMMENT 'Attempts whose tokens reached the client',
    num_resumes UInt32 COMMENT 'Times that the client came back to its stream',
    num_stalls UInt32 COMMENT 'Gaps of a second or more between two deliveries of tokens',
    stalled_ms Float64 COMMENT 'All such gaps together, ms',
    longest_gap_ms Float64 COMMENT 'The longest gap between two deliveries of tokens, ms',
    intake_ms Float64 COMMENT 'Latency, ms: from the request at the gateway to its receipt',
    outcome LowCardinality(String) COMMENT 'How the stream ended: as `status` of requests, or disconnected',
    done_at DateTime64(6, 'UTC') COMMENT 'When the stream ended, UTC',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins'
)
COMMENT 'Each row of deliveries once, as deliveries FINAL has it.'
AS SELECT * FROM deliveries FINAL;

-- A worker's state over one sampling period that ended at sampled_at. A worker of several devices has
-- one row: device times and energy are of all of its devices together.
CREATE TABLE IF NOT EXISTS worker_samples
(
    worker LowCardinality(String) COMMENT 'The worker''s id, of one start of it',
    name LowCardinality(String) COMMENT 'The worker''s name, which stays over restarts',
    model LowCardinality(String) COMMENT 'The model that the worker serves',
    sampled_at DateTime64(6, 'UTC') COMMENT 'When the sampled period ended, UTC',
    period_ms Float64 COMMENT 'How long the period was, ms',
    num_running UInt32 COMMENT 'Sequences in the batch at the end of the period',
    num_waiting UInt32 COMMENT 'Requests of the worker that are not in the batch',
    num_blocks UInt32 COMMENT 'KV blocks that there are',
    num_free_blocks UInt32 COMMENT 'KV blocks that can be allocated',
    num_steps UInt32 COMMENT 'Steps of the engine in the period',
    step_ms_mean Float64 COMMENT 'How long a step took on average, ms',
    busy_share Float64 COMMENT 'Part of the period in which the device was busy, 0 to 1',
    busy_us UInt64 DEFAULT 0 COMMENT 'Device time, us: how long its devices were busy in the period, all of them together',
    charged_us UInt64 DEFAULT 0 COMMENT 'Device time, us: how much of busy_us requests were charged for',
    energy_j Nullable(Float64) COMMENT 'Energy, J: what the device''s counter counted over the period, idle time included; NULL without a counter',
    charged_j Nullable(Float64) COMMENT 'Energy, J: how much of energy_j requests were given; the rest was idle',
    prefill_tokens UInt32 COMMENT 'Tokens of prompts that were computed, again after a preemption as well',
    decode_tokens UInt32 COMMENT 'Tokens that were computed one after the other',
    num_preemptions UInt32 COMMENT 'Times that a request was put back for want of KV blocks',
    queue_depth UInt32 COMMENT 'Jobs in the queue of the model, which all its workers share',
    prefix_query_tokens UInt32 DEFAULT 0 COMMENT 'Tokens that were looked for in the prefix cache',
    prefix_hit_tokens UInt32 DEFAULT 0 COMMENT 'Tokens that were found there',
    role LowCardinality(String) DEFAULT 'both' COMMENT 'What work it is preferred for: both, prefill, decode',
    pulled_tokens UInt32 DEFAULT 0 COMMENT 'Tokens that came from other workers'' KV caches, in whole blocks',
    served_tokens UInt32 DEFAULT 0 COMMENT 'Tokens of its KV cache that went to other workers, in whole blocks',
    num_devices UInt32 DEFAULT 1 COMMENT 'Devices that the worker computes on, all of them at a time',
    device_name LowCardinality(String) DEFAULT '' COMMENT 'The device as its driver names it; empty on a CPU',
    device_share Float64 DEFAULT 0 COMMENT 'The use of the device that its driver shows, 0 to 1; 0 where there is none to ask',
    device_memory_bytes UInt64 DEFAULT 0 COMMENT 'Memory of the device in use, bytes; 0 where there is no driver to ask',
    device_memory_total_bytes UInt64 DEFAULT 0 COMMENT 'Memory that the device has, bytes; 0 where there is no driver to ask',
    device_per_hour Decimal(38, 12) DEFAULT 0 COMMENT 'What an hour of one device costs, in `currency`',
    currency LowCardinality(String) DEFAULT '' COMMENT 'The currency of the amounts in this row',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    INDEX sampled_at_range sampled_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (sampled_at, worker)
TTL toDateTime(sampled_at) + INTERVAL 14 DAY DELETE WHERE sampled_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'A worker''s last second, or up to 30 s of rest. Kept for 14 days.';

CREATE VIEW IF NOT EXISTS worker_samples_once
(
    worker LowCardinality(String) COMMENT 'The worker''s id, of one start of it',
    name LowCardinality(String) COMMENT 'The worker''s name, which stays over restarts',
    model LowCardinality(String) COMMENT 'The model that the worker serves',
    sampled_at DateTime64(6, 'UTC') COMMENT 'When the sampled period ended, UTC',
    period_ms Float64 COMMENT 'How long the period was, ms',
    num_running UInt32 COMMENT 'Sequences in the batch at the end of the period',
    num_waiting UInt32 COMMENT 'Requests of the worker that are not in the batch',
    num_blocks UInt32 COMMENT 'KV blocks that there are',
    num_free_blocks UInt32 COMMENT 'KV blocks that can be allocated',
    num_steps UInt32 COMMENT 'Steps of the engine in the period',
    step_ms_mean Float64 COMMENT 'How long a step took on average, ms',
    busy_share Float64 COMMENT 'Part of the period in which the device was busy, 0 to 1',
    busy_us UInt64 COMMENT 'Device time, us: how long its devices were busy in the period, all of them together',
    charged_us UInt64 COMMENT 'Device time, us: how much of busy_us requests were charged for',
    energy_j Nullable(Float64) COMMENT 'Energy, J: what the device''s counter counted over the period, idle time included; NULL without a counter',
    charged_j Nullable(Float64) COMMENT 'Energy, J: how much of energy_j requests were given; the rest was idle',
    prefill_tokens UInt32 COMMENT 'Tokens of prompts that were computed, again after a preemption as well',
    decode_tokens UInt32 COMMENT 'Tokens that were computed one after the other',
    num_preemptions UInt32 COMMENT 'Times that a request was put back for want of KV blocks',
    queue_depth UInt32 COMMENT 'Jobs in the queue of the model, which all its workers share',
    prefix_query_tokens UInt32 COMMENT 'Tokens that were looked for in the prefix cache',
    prefix_hit_tokens UInt32 COMMENT 'Tokens that were found there',
    role LowCardinality(String) COMMENT 'What work it is preferred for: both, prefill, decode',
    pulled_tokens UInt32 COMMENT 'Tokens that came from other workers'' KV caches, in whole blocks',
    served_tokens UInt32 COMMENT 'Tokens of its KV cache that went to other workers, in whole blocks',
    num_devices UInt32 COMMENT 'Devices that the worker computes on, all of them at a time',
    device_name LowCardinality(String) COMMENT 'The device as its driver names it; empty on a CPU',
    device_share Float64 COMMENT 'The use of the device that its driver shows, 0 to 1; 0 where there is none to ask',
    device_memory_bytes UInt64 COMMENT 'Memory of the device in use, bytes; 0 where there is no driver to ask',
    device_memory_total_bytes UInt64 COMMENT 'Memory that the device has, bytes; 0 where there is no driver to ask',
    device_per_hour Decimal(38, 12) COMMENT 'What an hour of one device costs, in `currency`',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins'
)
COMMENT 'Each row of worker_samples once, as worker_samples FINAL has it.'
AS SELECT * FROM worker_samples FINAL;

-- Prompts and answers word for word, only of tenants that asked for them to be kept, for 30 days. A
-- row without a time, or with a time in the future, is kept for 30 days from when it was stored.
CREATE TABLE IF NOT EXISTS transcripts
(
    request_id String COMMENT 'The request''s id, as the client got it',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    model LowCardinality(String) COMMENT 'The model that answered',
    prompt String COMMENT 'The prompt, word for word' CODEC(ZSTD(3)),
    completion String COMMENT 'The answer, word for word' CODEC(ZSTD(3)),
    done_at DateTime64(6, 'UTC') COMMENT 'When it ended, UTC',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    stored_at DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored, UTC'
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY request_id
TTL if(done_at > toDateTime64('2000-01-01', 6, 'UTC'), least(toDateTime(done_at, 'UTC'), stored_at), stored_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'The words of prompts and answers, of tenants that asked for it. Kept for 30 days.';

CREATE VIEW IF NOT EXISTS transcripts_once
(
    request_id String COMMENT 'The request''s id, as the client got it',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    model LowCardinality(String) COMMENT 'The model that answered',
    prompt String COMMENT 'The prompt, word for word',
    completion String COMMENT 'The answer, word for word',
    done_at DateTime64(6, 'UTC') COMMENT 'When it ended, UTC',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    stored_at DateTime('UTC') COMMENT 'When the row was stored, UTC'
)
COMMENT 'Each row of transcripts once, as transcripts FINAL has it.'
AS SELECT * FROM transcripts FINAL;

-- Requests that gateways refused before they became jobs: a row for each kind of refusal, gateway and
-- second, with the number of requests. Who asked is empty where it is not known. No text that a
-- client wrote is in it.
CREATE TABLE IF NOT EXISTS refusals
(
    recorded_at DateTime64(6, 'UTC') COMMENT 'The second that the refusals are of, UTC',
    gateway LowCardinality(String) COMMENT 'The gateway that it was',
    number UInt32 COMMENT 'The number of the row within gateway and second',
    tenant LowCardinality(String) COMMENT 'Who asked; empty for an unknown caller',
    key_id LowCardinality(String) ALIAS api_key COMMENT 'The id of the API key that asked; empty for an unknown caller',
    api_key LowCardinality(String) COMMENT 'The id of the API key; as key_id',
    door LowCardinality(String) COMMENT 'The route that was asked for; unmatched, origin, connection or others if it was none',
    status UInt16 COMMENT 'The HTTP status, or the one that says the same of a WebSocket',
    code LowCardinality(String) COMMENT 'The stable code of the error',
    limit_reached LowCardinality(String) COMMENT 'The limit that was reached, if one was',
    requests UInt32 COMMENT 'How many requests the row counts: add up, do not count rows',
    first_at DateTime64(6, 'UTC') COMMENT 'When the first of them was refused, UTC',
    last_at DateTime64(6, 'UTC') COMMENT 'When the last of them was refused, UTC',
    request_id String COMMENT 'The x-request-id of one of them',
    request_ids Array(String) DEFAULT if(request_id = '', [], [request_id]) COMMENT 'The x-request-ids of the first of them',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins'
)
ENGINE = ReplacingMergeTree(outbox_sequence)
ORDER BY (recorded_at, gateway, number)
TTL toDateTime(recorded_at) + INTERVAL 90 DAY DELETE WHERE recorded_at > toDateTime64('2000-01-01', 6, 'UTC')
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'How often a gateway refused one thing within a second. Kept for 90 days.';

CREATE VIEW IF NOT EXISTS refusals_once
(
    recorded_at DateTime64(6, 'UTC') COMMENT 'The second that the refusals are of, UTC',
    gateway LowCardinality(String) COMMENT 'The gateway that it was',
    number UInt32 COMMENT 'The number of the row within gateway and second',
    tenant LowCardinality(String) COMMENT 'Who asked; empty for an unknown caller',
    api_key LowCardinality(String) COMMENT 'The id of the API key; as key_id',
    door LowCardinality(String) COMMENT 'The route that was asked for; unmatched, origin, connection or others if it was none',
    status UInt16 COMMENT 'The HTTP status, or the one that says the same of a WebSocket',
    code LowCardinality(String) COMMENT 'The stable code of the error',
    limit_reached LowCardinality(String) COMMENT 'The limit that was reached, if one was',
    requests UInt32 COMMENT 'How many requests the row counts: add up, do not count rows',
    first_at DateTime64(6, 'UTC') COMMENT 'When the first of them was refused, UTC',
    last_at DateTime64(6, 'UTC') COMMENT 'When the last of them was refused, UTC',
    request_id String COMMENT 'The x-request-id of one of them',
    request_ids Array(String) COMMENT 'The x-request-ids of the first of them',
    record_version UInt16 COMMENT 'The version of the record that this row was made of',
    outbox_sequence UInt64 COMMENT 'The place in the outbox: of rows of one identity the highest wins',
    key_id LowCardinality(String) COMMENT 'The id of the API key that asked; empty for an unknown caller'
)
COMMENT 'Each row of refusals once, as refusals FINAL has it.'
AS SELECT *, key_id FROM refusals FINAL;

-- The usage of each minute and group, computed from requests FINAL again whenever new rows touch the
-- minute, so that no row counts twice. A group whose rows are gone is_deleted. fingerprint is a hash of
-- the rows that were counted: a minute whose rows have another fingerprint is computed again. model is the
-- model that served, or the one that was asked for. itl_ms is tpot_ms weighted by its tokens. Of
-- energy_j, energy_requests and energy_tokens count the requests that have it.
CREATE TABLE IF NOT EXISTS usage_by_minute
(
    minute DateTime('UTC') COMMENT 'The minute in which the requests ended, by its begin, UTC',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    user String COMMENT 'The end user that the client named (`user`, `safety_identifier`, Anthropic''s `metadata.user_id`); empty if it named none',
    model LowCardinality(String) COMMENT 'The model that answered, or the one that was asked for',
    adapter LowCardinality(String) COMMENT 'The LoRA adapter; empty for the model itself',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    tier LowCardinality(String) COMMENT 'Service tier: enterprise, pro, free, batch',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    price_version LowCardinality(String) COMMENT 'The version of the price book that amounts were made by; empty if no worker had the request',
    key_id LowCardinality(String) COMMENT 'The id of the API key that asked; empty without one, and for what ended before keys were noted',
    requests UInt64 COMMENT 'Requests that ended',
    done UInt64 COMMENT 'Of these, answered to the end',
    cancelled UInt64 COMMENT 'Of these, cancelled by their clients',
    expired UInt64 COMMENT 'Of these, past their deadline',
    shed UInt64 COMMENT 'Of these, dropped for want of capacity',
    failed UInt64 COMMENT 'Of these, failed',
    prompt_tokens UInt64 COMMENT 'Tokens of the prompt, those from the cache included',
    cached_tokens UInt64 COMMENT 'Tokens of the prompt that were found in the prefix cache',
    completion_tokens UInt64 COMMENT 'Tokens that were generated',
    cost Decimal(38, 12) COMMENT 'What the tenant pays, in `currency`',
    device_us UInt64 COMMENT 'Device time, us: the requests'' shares',
    device_cost Decimal(38, 12) COMMENT 'What that device time cost us, in `currency`',
    energy_j Nullable(Float64) COMMENT 'Energy, J: the shares of the energy_requests; NULL if none was measured',
    energy_requests UInt64 DEFAULT 0 COMMENT 'Requests whose energy was measured',
    energy_tokens UInt64 DEFAULT 0 COMMENT 'Tokens that were computed for those: prompts without cached tokens, and completions',
    num_preemptions UInt64 COMMENT 'Times that a request was put back for want of KV blocks',
    num_moves UInt64 COMMENT 'Attempts that another one continued',
    queue_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt until a worker began, as a t-digest to merge',
    ttft_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt to the first token, as a t-digest to merge',
    tpot_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: mean time per token after the first, as a t-digest to merge',
    itl_ms AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Nullable(Float64), UInt32) COMMENT 'Latency, ms: tpot_ms weighted by its tokens, as a weighted t-digest to merge',
    total_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt to the end of what was answered, as a t-digest to merge',
    fingerprint UInt64 COMMENT 'A hash of the rows that this row counts; for the roll-up only',
    version UInt64 COMMENT 'When this row was computed, ns since 1970; the latest wins',
    is_deleted UInt8 COMMENT '1: the group is gone, and FINAL leaves the row out'
)
ENGINE = ReplacingMergeTree(version, is_deleted)
PRIMARY KEY (minute, tenant, user, model, adapter, source, tier, currency, price_version)
ORDER BY (minute, tenant, user, model, adapter, source, tier, currency, price_version, key_id)
TTL minute + INTERVAL 1830 DAY DELETE WHERE minute > toDateTime('2000-01-01', 'UTC')
COMMENT 'A minute of a tenant, user, model, adapter, source, tier, currency, price version and key. Kept for 1830 days.';

CREATE VIEW IF NOT EXISTS usage_by_minute_once
(
    minute DateTime('UTC') COMMENT 'The minute in which the requests ended, by its begin, UTC',
    tenant LowCardinality(String) COMMENT 'Whose request it was',
    user String COMMENT 'The end user that the client named (`user`, `safety_identifier`, Anthropic''s `metadata.user_id`); empty if it named none',
    model LowCardinality(String) COMMENT 'The model that answered, or the one that was asked for',
    adapter LowCardinality(String) COMMENT 'The LoRA adapter; empty for the model itself',
    source LowCardinality(String) COMMENT 'The interface it came through: http, websocket, nats, bench',
    tier LowCardinality(String) COMMENT 'Service tier: enterprise, pro, free, batch',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    price_version LowCardinality(String) COMMENT 'The version of the price book that amounts were made by; empty if no worker had the request',
    key_id LowCardinality(String) COMMENT 'The id of the API key that asked; empty without one, and for what ended before keys were noted',
    requests UInt64 COMMENT 'Requests that ended',
    done UInt64 COMMENT 'Of these, answered to the end',
    cancelled UInt64 COMMENT 'Of these, cancelled by their clients',
    expired UInt64 COMMENT 'Of these, past their deadline',
    shed UInt64 COMMENT 'Of these, dropped for want of capacity',
    failed UInt64 COMMENT 'Of these, failed',
    prompt_tokens UInt64 COMMENT 'Tokens of the prompt, those from the cache included',
    cached_tokens UInt64 COMMENT 'Tokens of the prompt that were found in the prefix cache',
    completion_tokens UInt64 COMMENT 'Tokens that were generated',
    cost Decimal(38, 12) COMMENT 'What the tenant pays, in `currency`',
    device_us UInt64 COMMENT 'Device time, us: the requests'' shares',
    device_cost Decimal(38, 12) COMMENT 'What that device time cost us, in `currency`',
    energy_j Nullable(Float64) COMMENT 'Energy, J: the shares of the energy_requests; NULL if none was measured',
    energy_requests UInt64 COMMENT 'Requests whose energy was measured',
    energy_tokens UInt64 COMMENT 'Tokens that were computed for those: prompts without cached tokens, and completions',
    num_preemptions UInt64 COMMENT 'Times that a request was put back for want of KV blocks',
    num_moves UInt64 COMMENT 'Attempts that another one continued',
    queue_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt until a worker began, as a t-digest to merge',
    ttft_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt to the first token, as a t-digest to merge',
    tpot_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: mean time per token after the first, as a t-digest to merge',
    itl_ms AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Nullable(Float64), UInt32) COMMENT 'Latency, ms: tpot_ms weighted by its tokens, as a weighted t-digest to merge',
    total_ms AggregateFunction(quantilesTDigest(0.5, 0.9, 0.95, 0.99), Nullable(Float64)) COMMENT 'Latency, ms: from receipt to the end of what was answered, as a t-digest to merge',
    fingerprint UInt64 COMMENT 'A hash of the rows that this row counts; for the roll-up only',
    version UInt64 COMMENT 'When this row was computed, ns since 1970; the latest wins',
    is_deleted UInt8 COMMENT '1: the group is gone, and FINAL leaves the row out'
)
COMMENT 'Each row of usage_by_minute once, as usage_by_minute FINAL has it.'
AS SELECT * FROM usage_by_minute FINAL;

-- What workers did in each minute, computed from worker_samples FINAL as usage_by_minute is from
-- requests, and kept after the samples are gone. A sample counts in the minute in which its period
-- ended. Sampled values are summed up over time: divide by period_ms for the mean.
CREATE TABLE IF NOT EXISTS workers_by_minute
(
    minute DateTime('UTC') COMMENT 'The minute in which the samples'' periods ended, by its begin, UTC',
    model LowCardinality(String) COMMENT 'The model that the worker serves',
    worker LowCardinality(String) COMMENT 'The worker''s id, of one start of it',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    device_per_hour Decimal(38, 12) COMMENT 'What an hour of the device costs, in `currency`',
    name LowCardinality(String) COMMENT 'The worker''s name, which stays over restarts',
    device_name LowCardinality(String) COMMENT 'The device as its driver names it; empty on a CPU',
    samples UInt64 COMMENT 'Samples that the row counts',
    period_ms Float64 COMMENT 'Their periods together, ms: divide by it for a mean over time',
    busy_us UInt64 COMMENT 'Device time, us: how long the device was busy',
    charged_us UInt64 COMMENT 'Device time, us: how much of busy_us requests were charged for',
    idle_us UInt64 COMMENT 'Device time, us: how long the device idled',
    energy_j Nullable(Float64) COMMENT 'Energy, J: what the device''s counter counted, idle time included; NULL without a counter',
    charged_j Nullable(Float64) COMMENT 'Energy, J: how much of energy_j requests were given; the rest was idle',
    num_steps UInt64 COMMENT 'Steps of the engine',
    steps_ms Float64 COMMENT 'How long the steps took together, ms',
    prefill_tokens UInt64 COMMENT 'Tokens of prompts that were computed, again after a preemption as well',
    decode_tokens UInt64 COMMENT 'Tokens that were computed one after the other',
    num_preemptions UInt64 COMMENT 'Times that a request was put back for want of KV blocks',
    prefix_query_tokens UInt64 COMMENT 'Tokens that were looked for in the prefix cache',
    prefix_hit_tokens UInt64 COMMENT 'Tokens that were found there',
    running_ms Float64 COMMENT 'Sequences in the batch, times ms',
    waiting_ms Float64 COMMENT 'Requests that were not in the batch, times ms',
    queued_ms Float64 COMMENT 'Jobs in the queue of the model, times ms',
    most_queued UInt32 COMMENT 'The most jobs in the queue of the model',
    blocks_ms Float64 COMMENT 'KV blocks, times ms',
    used_blocks_ms Float64 COMMENT 'KV blocks in use, times ms',
    device_share_ms Float64 COMMENT 'The use of the device that its driver shows, 0 to 1, times ms',
    device_memory_bytes UInt64 COMMENT 'The most memory of the device in use, bytes',
    device_memory_total_bytes UInt64 COMMENT 'Memory that the device has, bytes',
    fingerprint UInt64 COMMENT 'A hash of the rows that this row counts; for the roll-up only',
    version UInt64 COMMENT 'When this row was computed, ns since 1970; the latest wins',
    is_deleted UInt8 COMMENT '1: the group is gone, and FINAL leaves the row out'
)
ENGINE = ReplacingMergeTree(version, is_deleted)
ORDER BY (minute, model, worker, currency, device_per_hour)
TTL minute + INTERVAL 400 DAY DELETE WHERE minute > toDateTime('2000-01-01', 'UTC')
COMMENT 'A minute of a worker. Kept for 400 days.';

CREATE VIEW IF NOT EXISTS workers_by_minute_once
(
    minute DateTime('UTC') COMMENT 'The minute in which the samples'' periods ended, by its begin, UTC',
    model LowCardinality(String) COMMENT 'The model that the worker serves',
    worker LowCardinality(String) COMMENT 'The worker''s id, of one start of it',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    device_per_hour Decimal(38, 12) COMMENT 'What an hour of the device costs, in `currency`',
    name LowCardinality(String) COMMENT 'The worker''s name, which stays over restarts',
    device_name LowCardinality(String) COMMENT 'The device as its driver names it; empty on a CPU',
    samples UInt64 COMMENT 'Samples that the row counts',
    period_ms Float64 COMMENT 'Their periods together, ms: divide by it for a mean over time',
    busy_us UInt64 COMMENT 'Device time, us: how long the device was busy',
    charged_us UInt64 COMMENT 'Device time, us: how much of busy_us requests were charged for',
    idle_us UInt64 COMMENT 'Device time, us: how long the device idled',
    energy_j Nullable(Float64) COMMENT 'Energy, J: what the device''s counter counted, idle time included; NULL without a counter',
    charged_j Nullable(Float64) COMMENT 'Energy, J: how much of energy_j requests were given; the rest was idle',
    num_steps UInt64 COMMENT 'Steps of the engine',
    steps_ms Float64 COMMENT 'How long the steps took together, ms',
    prefill_tokens UInt64 COMMENT 'Tokens of prompts that were computed, again after a preemption as well',
    decode_tokens UInt64 COMMENT 'Tokens that were computed one after the other',
    num_preemptions UInt64 COMMENT 'Times that a request was put back for want of KV blocks',
    prefix_query_tokens UInt64 COMMENT 'Tokens that were looked for in the prefix cache',
    prefix_hit_tokens UInt64 COMMENT 'Tokens that were found there',
    running_ms Float64 COMMENT 'Sequences in the batch, times ms',
    waiting_ms Float64 COMMENT 'Requests that were not in the batch, times ms',
    queued_ms Float64 COMMENT 'Jobs in the queue of the model, times ms',
    most_queued UInt32 COMMENT 'The most jobs in the queue of the model',
    blocks_ms Float64 COMMENT 'KV blocks, times ms',
    used_blocks_ms Float64 COMMENT 'KV blocks in use, times ms',
    device_share_ms Float64 COMMENT 'The use of the device that its driver shows, 0 to 1, times ms',
    device_memory_bytes UInt64 COMMENT 'The most memory of the device in use, bytes',
    device_memory_total_bytes UInt64 COMMENT 'Memory that the device has, bytes',
    fingerprint UInt64 COMMENT 'A hash of the rows that this row counts; for the roll-up only',
    version UInt64 COMMENT 'When this row was computed, ns since 1970; the latest wins',
    is_deleted UInt8 COMMENT '1: the group is gone, and FINAL leaves the row out'
)
COMMENT 'Each row of workers_by_minute once, as workers_by_minute FINAL has it.'
AS SELECT * FROM workers_by_minute FINAL;

-- What tokens and devices cost, by the version of the price book that a request's row names. The
-- prices of a version never change: there is no TTL.
CREATE TABLE IF NOT EXISTS prices
(
    model LowCardinality(String) COMMENT 'The model',
    version String COMMENT 'The version of the price book, which names these prices for ever',
    currency LowCardinality(String) COMMENT 'The currency of the amounts in this row',
    input_per_million Decimal(38, 12) COMMENT 'For a million tokens of prompts that were computed, in `currency`',
    cached_input_per_million Decimal(38, 12) COMMENT 'For a million tokens of prompts from the cache, in `currency`',
    output_per_million Decimal(38, 12) COMMENT 'For a million generated tokens, in `currency`',
    device_per_hour Decimal(38, 12) COMMENT 'What an hour of the device costs, in `currency`',
    first_seen DateTime64(3, 'UTC') COMMENT 'When the store learned of the version, UTC'
)
ENGINE = ReplacingMergeTree
ORDER BY (model, version)
COMMENT 'A version of a model''s prices. Kept for ever.';

-- Which places of the outbox have been stored, as ranges whose first and last place are included.
-- The range that begins at 1 ends at the low-water mark: everything up to it is stored.
CREATE TABLE IF NOT EXISTS outbox_ledger
(
    first_sequence UInt64 COMMENT 'The first place of a range of the outbox that has landed',
    last_sequence UInt64 COMMENT 'The last place of it'
)
ENGINE = ReplacingMergeTree(last_sequence)
ORDER BY first_sequence
COMMENT 'Which places of the outbox have landed; for the sink only.';
