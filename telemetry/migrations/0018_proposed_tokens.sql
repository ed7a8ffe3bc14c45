-- Tokens that were proposed before they were drawn. A row of the time before has none.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS proposed_tokens UInt32 DEFAULT 0 AFTER resampled,
    ADD COLUMN IF NOT EXISTS accepted_tokens UInt32 DEFAULT 0 AFTER proposed_tokens;

CREATE OR REPLACE VIEW requests_once AS
SELECT * EXCEPT (tpot_us), tpot_ms FROM requests FINAL;

ALTER TABLE requests
    COMMENT COLUMN IF EXISTS proposed_tokens 'Tokens that were computed in case they should be the next, by the attempt that ended it',
    COMMENT COLUMN IF EXISTS accepted_tokens 'How many of proposed_tokens were the next, and so saved a step';

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
    COMMENT COLUMN IF EXISTS num_preemptions 'Times that it was put back for want of KV blocks',
    COMMENT COLUMN IF EXISTS record_version 'The version of the record that this row was made of',
    COMMENT COLUMN IF EXISTS outbox_sequence 'The place in the outbox: of rows of one identity the highest wins',
    MODIFY COMMENT 'Each row of requests once, as requests FINAL has it.';
