-- Workers of several devices. Device times are of all of them together, so that a sample's idle time is
-- what they had, and were not busy for. A row of the time before is of one.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS num_devices UInt32 DEFAULT 1 AFTER pulls;

ALTER TABLE worker_samples
    ADD COLUMN IF NOT EXISTS num_devices UInt32 DEFAULT 1 AFTER served_tokens;

CREATE OR REPLACE VIEW requests_once AS
SELECT * EXCEPT (tpot_us), tpot_ms FROM requests FINAL;

CREATE OR REPLACE VIEW worker_samples_once AS
SELECT * FROM worker_samples FINAL;

ALTER TABLE requests
    COMMENT COLUMN IF EXISTS num_devices 'Devices that the worker which ended it computes on; device_us is of all of them together';

ALTER TABLE worker_samples
    COMMENT COLUMN IF EXISTS busy_us 'Device time, us: how long its devices were busy in the period, all of them together',
    COMMENT COLUMN IF EXISTS num_devices 'Devices that the worker computes on, all of them at a time',
    COMMENT COLUMN IF EXISTS device_per_hour 'What an hour of one device costs, in `currency`';

ALTER TABLE requests_once
    COMMENT COLUMN IF EXISTS request_id 'The request''s id, as the client got it',
    COMMENT COLUMN IF EXISTS tenant 'Whose request it was',
    COMMENT COLUMN IF EXISTS key_id 'The id of the API key that asked; empty without one, and as its publisher says for a job that came over NATS',
    COMMENT COLUMN IF EXISTS user 'The end user that the client named (`user`, `safety_identifier`, Anthropic''s `metadata.user_id`); empty if it named none',
    COMMENT COLUMN IF EXISTS session 'The session (`session_id`); empty without one',
    COMMENT COLUMN IF EXISTS metadata 'What the client noted on the request (OpenAI''s `metadata`): up to 16 pairs of text',
    COMMENT COLUMN IF EXISTS source 'The interface it came through: http, websocket, nats, bench',
    COMMENT COLUMN IF EXISTS tier 'Service tier: enterprise, pro, free, batch',
    COMMENT COLUMN IF EXISTS model_requested 'The model that was asked for; auto left the choice to the gateway',
    COMMENT COLUMN IF EXISTS model_served 'The model that answered; empty if the request came to none',
    COMMENT COLUMN IF EXISTS route_reason 'Why `auto` became this model; empty if the model was named',
    COMMENT COLUMN IF EXISTS worker 'The worker that ended it; empty if none had it',
    COMMENT COLUMN IF EXISTS adapter 'The LoRA adapter; empty for the model itself',
    COMMENT COLUMN IF EXISTS prompt_tokens 'Tokens of the prompt, those from the cache included',
    COMMENT COLUMN IF EXISTS cached_tokens 'Tokens of the prompt that were found in the prefix cache',
    COMMENT COLUMN IF EXISTS completion_tokens 'Tokens that were generated',
    COMMENT COLUMN IF EXISTS queue_ms 'Latency, ms: from receipt until a worker began; NULL if none did',
    COMMENT COLUMN IF EXISTS ttft_ms 'Latency, ms: from receipt to the first token (TTFT); NULL without one',
    COMMENT COLUMN IF EXISTS tpot_ms 'Latency, ms: mean time per token after the first (TPOT); NULL below two tokens',
    COMMENT COLUMN IF EXISTS total_ms 'Latency, ms: from receipt to the end (E2E)',
    COMMENT COLUMN IF EXISTS finish_reason 'Why the answer ended: stop, length, tool_calls and so on; empty if it did not end by itself',
    COMMENT COLUMN IF EXISTS status 'How it ended: done, cancelled, expired, shed, failed',
    COMMENT COLUMN IF EXISTS error_code 'The stable code of the error, if it failed',
    COMMENT COLUMN IF EXISTS cost 'What the tenant pays, in `currency`',
    COMMENT COLUMN IF EXISTS device_us 'Device time, us: its share of the time that devices were busy, of all its attempts',
    COMMENT COLUMN IF EXISTS device_cost 'What that device time cost us, in `currency`',
    COMMENT COLUMN IF EXISTS energy_j 'Energy, J: its share of what counters counted while devices were busy; NULL unless all its attempts were measured',
    COMMENT COLUMN IF EXISTS currency 'The currency of the amounts in this row',
    COMMENT COLUMN IF EXISTS price_version 'The version of the price book that amounts were made by; empty if no worker had the request',
    COMMENT COLUMN IF EXISTS received_at 'When a gateway or scheduler received it, UTC',
    COMMENT COLUMN IF EXISTS dispatched_at 'When it was sent to the worker that ended it, UTC; NULL if it never was',
    COMMENT COLUMN IF EXISTS started_at 'When that worker began, UTC; NULL if none did',
    COMMENT COLUMN IF EXISTS first_token_at 'When its first token was made, UTC; NULL without one',
    COMMENT COLUMN IF EXISTS done_at 'When it ended, UTC',
    COMMENT COLUMN IF EXISTS epoch 'The number of the attempt that ended it, which rises with each',
    COMMENT COLUMN IF EXISTS lives 'The attempts before that one: epoch, worker, times in UTC, device time in us',
    COMMENT COLUMN IF EXISTS trace_id 'The id of its distributed trace; empty if none was recorded',
    COMMENT COLUMN IF EXISTS cost_method 'How device_us is known: steps, or tokens for engines that do not tell',
    COMMENT COLUMN IF EXISTS resampled 'Whether it went on, after a crash, with tokens that its seed does not give',
    COMMENT COLUMN IF EXISTS proposed_tokens 'Tokens that were computed in case they should be the next, by the attempt that ended it',
    COMMENT COLUMN IF EXISTS accepted_tokens 'How many of proposed_tokens were the next, and so saved a step',
    COMMENT COLUMN IF EXISTS pulled_tokens 'Tokens of prompt and earlier attempts that came from other workers'' KV caches, of all its attempts',
    COMMENT COLUMN IF EXISTS kv_source 'The worker that the last of pulled_tokens came from; empty if none did',
    COMMENT COLUMN IF EXISTS pulls 'The attempts that pulled tokens, the last one included: epoch, worker that they came from, how many',
    COMMENT COLUMN IF EXISTS num_devices 'Devices that the worker which ended it computes on; device_us is of all of them together',
    COMMENT COLUMN IF EXISTS num_preemptions 'Times that it was put back for want of KV blocks',
    COMMENT COLUMN IF EXISTS record_version 'The version of the record that this row was made of',
    COMMENT COLUMN IF EXISTS outbox_sequence 'The place in the outbox: of rows of one identity the highest wins',
    MODIFY COMMENT 'Each row of requests once, as requests FINAL has it.';

ALTER TABLE worker_samples_once
    COMMENT COLUMN IF EXISTS worker 'The worker''s id, of one start of it',
    COMMENT COLUMN IF EXISTS name 'The worker''s name, which stays over restarts',
    COMMENT COLUMN IF EXISTS model 'The model that the worker serves',
    COMMENT COLUMN IF EXISTS sampled_at 'When the sampled period ended, UTC',
    COMMENT COLUMN IF EXISTS period_ms 'How long the period was, ms',
    COMMENT COLUMN IF EXISTS num_running 'Sequences in the batch at the end of the period',
    COMMENT COLUMN IF EXISTS num_waiting 'Requests of the worker that are not in the batch',
    COMMENT COLUMN IF EXISTS num_blocks 'KV blocks that there are',
    COMMENT COLUMN IF EXISTS num_free_blocks 'KV blocks that can be allocated',
    COMMENT COLUMN IF EXISTS num_steps 'Steps of the engine in the period',
    COMMENT COLUMN IF EXISTS step_ms_mean 'How long a step took on average, ms',
    COMMENT COLUMN IF EXISTS busy_share 'Part of the period in which the device was busy, 0 to 1',
    COMMENT COLUMN IF EXISTS busy_us 'Device time, us: how long its devices were busy in the period, all of them together',
    COMMENT COLUMN IF EXISTS charged_us 'Device time, us: how much of busy_us requests were charged for',
    COMMENT COLUMN IF EXISTS energy_j 'Energy, J: what the device''s counter counted over the period, idle time included; NULL without a counter',
    COMMENT COLUMN IF EXISTS charged_j 'Energy, J: how much of energy_j requests were given; the rest was idle',
    COMMENT COLUMN IF EXISTS prefill_tokens 'Tokens of prompts that were computed, again after a preemption as well',
    COMMENT COLUMN IF EXISTS decode_tokens 'Tokens that were computed one after the other',
    COMMENT COLUMN IF EXISTS num_preemptions 'Times that a request was put back for want of KV blocks',
    COMMENT COLUMN IF EXISTS queue_depth 'Jobs in the queue of the model, which all its workers share',
    COMMENT COLUMN IF EXISTS prefix_query_tokens 'Tokens that were looked for in the prefix cache',
    COMMENT COLUMN IF EXISTS prefix_hit_tokens 'Tokens that were found there',
    COMMENT COLUMN IF EXISTS role 'What work it is preferred for: both, prefill, decode',
    COMMENT COLUMN IF EXISTS pulled_tokens 'Tokens that came from other workers'' KV caches, in whole blocks',
    COMMENT COLUMN IF EXISTS served_tokens 'Tokens of its KV cache that went to other workers, in whole blocks',
    COMMENT COLUMN IF EXISTS num_devices 'Devices that the worker computes on, all of them at a time',
    COMMENT COLUMN IF EXISTS device_name 'The device as its driver names it; empty on a CPU',
    COMMENT COLUMN IF EXISTS device_share 'The use of the device that its driver shows, 0 to 1; 0 where there is none to ask',
    COMMENT COLUMN IF EXISTS device_memory_bytes 'Memory of the device in use, bytes; 0 where there is no driver to ask',
    COMMENT COLUMN IF EXISTS device_memory_total_bytes 'Memory that the device has, bytes; 0 where there is no driver to ask',
    COMMENT COLUMN IF EXISTS device_per_hour 'What an hour of one device costs, in `currency`',
    COMMENT COLUMN IF EXISTS currency 'The currency of the amounts in this row',
    COMMENT COLUMN IF EXISTS record_version 'The version of the record that this row was made of',
    COMMENT COLUMN IF EXISTS outbox_sequence 'The place in the outbox: of rows of one identity the highest wins',
    MODIFY COMMENT 'Each row of worker_samples once, as worker_samples FINAL has it.';
