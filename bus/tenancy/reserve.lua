-- Reserve what a request may use of each of its accounts, or nothing at all.
--
-- KEYS: the reservation, the set of currencies; then for each account its record, buckets, running
-- requests, holds and what it has spent this month.
-- ARGV: the time in ms (empty: Redis' own), the request's id, ms until it lapses, ms to keep the
-- reservation after that, tokens, cost in billionths, 1 if it is a job that waits in line, the suffix
-- of the cost's currency (empty: the default one), how many requests it counts as; then for each
-- account the version of its record, requests and tokens per minute, concurrent requests and budget in
-- that currency (empty: no limit).
--
-- Each currency is counted by itself. Spent money is under the account's key with the suffix. A
-- request's hold is its billionths with the suffix. The sum of a currency's holds is in the field
-- named as the suffix.
--
-- A job that waits in line takes each place that becomes free, so requests of its account that cannot
-- wait would find none. Once such a request is refused, jobs leave them a quarter of each limit, at
-- least one place, until no such request has come for YIELD_MS.
--
-- A bucket holds the usage that has not drained yet, in ticks. One request or token is as many ticks
-- as a minute has ms. So a limit of n a minute drains n ticks each ms, and all numbers are integers.
-- A bucket drains in the order in which it was filled. It also counts all requests and tokens ever
-- added, and each reservation keeps these counts. Usage added later lies above the reservation's, so
-- the undrained part of the reservation is known.
--
-- Returns {'changed', record, version, ...} if a version is no longer that of the record;
-- {'refused', account, limit, ms to wait, ...} or {'granted', 0, '', 0, ...} with five numbers for
-- each account: ticks of requests and of tokens in the buckets, running requests, billionths
-- spent and held. A wait of -1: not before the next month; of -2: never.

local TICKS = 60000
local MAX_LAPSED = 1000
local DAY_MS = 86400000
local YIELD_MS = 5000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local request, lapse_ms, keep_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local tokens, cost = tonumber(ARGV[5]), tonumber(ARGV[6])
local is_in_line = ARGV[7] == '1'
local currency = ARGV[8]
local requests = tonumber(ARGV[9])

local accounts = {}
local changed = false
for i = 1, (#KEYS - 2) / 5 do
  local k, a = 5 * i - 3, 5 * i + 4
  accounts[i] = {
    record = KEYS[k + 1], buckets = KEYS[k + 2], running = KEYS[k + 3], holds = KEYS[k + 4],
    spent_key = KEYS[k + 5],
    rpm = tonumber(ARGV[a + 2]), tpm = tonumber(ARGV[a + 3]),
    concurrent = tonumber(ARGV[a + 4]), budget = tonumber(ARGV[a + 5]),
  }
  if (redis.call('HGET', KEYS[k + 1], 'version') or '') ~= ARGV[a + 1] then changed = true end
end

if changed then
  local answer = {'changed'}
  for _, account in ipairs(accounts) do
    local known = redis.call('HMGET', account.record, 'record', 'version')
    answer[#answer + 1] = known[1] or ''
    answer[#answer + 1] = known[2] or ''
  end
  return answer
end

local function release_lapsed(account)
  local lapsed =
    redis.call('ZRANGEBYSCORE', account.running, '-inf', now, 'LIMIT', 0, MAX_LAPSED)
  for _, id in ipairs(lapsed) do
    redis.call('ZREM', account.running, id)
    local held = redis.call('HGET', account.holds, id)
    if held then
      redis.call('HDEL', account.holds, id)
      local nano, held_in = string.match(held, '^(%d+)(.*)$')
      redis.call('HINCRBY', account.holds, held_in, '-' .. nano)
    end
  end
end

local function drained(ticks, per_minute, elapsed)
  if not per_minute then return 0 end
  return math.max(0, (tonumber(ticks) or 0) - elapsed * per_minute)
end

local function load(account)
  release_lapsed(account)
  local kept = redis.call('HMGET', account.buckets, 'at', 'requests', 'tokens', 'requests_taken',
    'tokens_taken', 'yields_until')
  account.requests_taken = tonumber(kept[4]) or 0
  account.tokens_taken = tonumber(kept[5]) or 0
  account.yields = now < (tonumber(kept[6]) or 0)
  account.at = math.max(tonumber(kept[1]) or 0, now)
  local elapsed = math.max(0, now - (tonumber(kept[1]) or now))
  account.requests = drained(kept[2], account.rpm, elapsed)
  account.tokens = drained(kept[3], account.tpm, elapsed)
  account.num_running = redis.call('ZCOUNT', account.running, '(' .. now, '+inf')
  account.held = tonumber(redis.call('HGET', account.holds, currency) or 0)
  account.spent = tonumber(redis.call('GET', account.spent_key .. currency) or 0)
end

local refused, limit, wait = 0, '', 0

-- Record a refusal. The limit with the longest wait is reported.
local function refuse(account, name, ms)
  local rank = ms < 0 and 1e15 - ms or ms
  local worst = wait < 0 and 1e15 - wait or wait
  if refused == 0 or rank > worst then refused, limit, wait = account, name, ms end
end

-- Return the share of a limit that jobs in line leave to other requests.
local function share(account, limit)
  return is_in_line and account.yields and math.max(1, math.floor(limit / 4)) or 0
end

local function check_bucket(i, account, name, used, wanted, per_minute)
  if not per_minute then return end
  local capacity = per_minute * TICKS
  if wanted * TICKS > capacity then
    refuse(i, name, -2)
    return
  end
  -- A job larger than its share waits until the bucket is empty.
  capacity = math.max(capacity - share(account, per_minute) * TICKS, wanted * TICKS)
  if used + wanted * TICKS > capacity then
    refuse(i, name, math.ceil((used + wanted * TICKS - capacity) / per_minute))
  end
end

local function check(i, account)
  check_bucket(i, account, 'requests_per_minute', account.requests, requests, account.rpm)
  check_bucket(i, account, 'tokens_per_minute', account.tokens, tokens, account.tpm)
  local concurrent = account.concurrent
  if concurrent and account.num_running >= concurrent - share(account, concurrent) then
    refuse(i, 'concurrent_requests', 1000)
  end
  if account.budget and cost > 0 then
    if account.spent + cost > account.budget then
      refuse(i, 'monthly_budget', -1)
    elseif account.spent + account.held + cost > account.budget then
      refuse(i, 'monthly_budget', 1000)
    end
  end
end

local function live_for(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

local function keep_yielding(account)
  redis.call('HSET', account.buckets, 'yields_until', now + YIELD_MS)
  live_for(account.buckets, YIELD_MS)
end

local function take(account)
  account.requests = account.rpm and account.requests + requests * TICKS or 0
  account.tokens = account.tpm and account.tokens + tokens * TICKS or 0
  account.requests_taken = account.requests_taken + requests
  account.tokens_taken = account.tokens_taken + tokens
  account.num_running = account.num_running + 1
  account.held = account.held + cost
  redis.call('HSET', account.buckets, 'at', account.at, 'requests', account.requests,
    'tokens', account.tokens, 'requests_taken', account.requests_taken,
    'tokens_taken', account.tokens_taken)
  if account.yields and not is_in_line then keep_yielding(account) end
  -- Keep the buckets as long as any reservation that refers to them.
  live_for(account.buckets, lapse_ms + keep_ms)
  redis.call('ZADD', account.running, now + lapse_ms, request)
  live_for(account.running, lapse_ms + DAY_MS)
  if cost > 0 then
    redis.call('HSET', account.holds, request, ARGV[6] .. currency)
    redis.call('HINCRBY', account.holds, currency, ARGV[6])
    live_for(account.holds, lapse_ms + DAY_MS)
  end
end

for i, account in ipairs(accounts) do load(account) end

-- A reservation that an attempt with a lost answer has made stays unchanged.
if redis.call('EXISTS', KEYS[1]) == 0 then
  for i, account in ipairs(accounts) do check(i, account) end
  if refused == 0 then
    local made = {requests = requests, tokens = tokens, accounts = {}}
    for i, account in ipairs(accounts) do
      take(account)
      made.accounts[i] = {
        account.buckets, account.running, account.holds, account.spent_key,
        account.rpm or 0, account.requests_taken, account.tpm or 0, account.tokens_taken,
      }
    end
    redis.call('SET', KEYS[1], cmsgpack.pack(made), 'PX', lapse_ms + keep_ms)
    if currency ~= '' then redis.call('SADD', KEYS[2], string.sub(currency, 2)) end
  elseif not is_in_line and wait >= 0 then
    keep_yielding(accounts[refused])
  end
end

local answer = {refused == 0 and 'granted' or 'refused', refused, limit, wait}
for _, account in ipairs(accounts) do
  for _, name in ipairs({'requests', 'tokens', 'num_running', 'spent', 'held'}) do
    answer[#answer + 1] = account[name]
  end
end
return answer
