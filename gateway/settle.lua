-- Give back what a request had set aside and did not use, and charge what it cost. Once.
--
-- KEYS: the reservation; then, for one that was granted while Redis was away, what each account has
-- spent in the month of the request.
-- ARGV: the request's id, its tokens (empty: nothing was served, so that it does not count as a
-- request either), its cost in billionths, ms to remember that it is settled, ms to keep what was
-- spent.
-- Answers 1 if this settled it, 0 if there was nothing to settle.

local TICKS = 60000
local SETTLED = 'settled'

local request, tokens, cost, keep_ms, month_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]

local function charge(key)
  if cost ~= '0' then
    redis.call('INCRBY', key, cost)
    redis.call('PEXPIRE', key, month_ms)
  end
end

local kept = redis.call('GET', KEYS[1])
if kept == SETTLED then return 0 end
if not kept then
  if #KEYS == 1 then return 0 end
  for i = 2, #KEYS do charge(KEYS[i]) end
  -- The reservation itself may still be on its way: it finds that it is over.
  redis.call('SET', KEYS[1], SETTLED, 'PX', keep_ms)
  return 1
end

local made = cmsgpack.unpack(kept)

-- The keys that are used from here on are those that the reservation was made with. A bucket that is
-- gone had drained, and so had one that holds less than what comes back. More may come than was set
-- aside: ``ticks`` is less than nothing then.
local function give_back(buckets, field, ticks, per_minute)
  local used = tonumber(redis.call('HGET', buckets, field))
  if per_minute == 0 or not used and ticks >= 0 then return end
  used = math.max(0, (used or 0) - ticks)
  redis.call('HSET', buckets, field, used)
  local drains_ms = math.ceil(used / per_minute) + TICKS
  if redis.call('PTTL', buckets) < drains_ms then redis.call('PEXPIRE', buckets, drains_ms) end
end

for _, account in ipairs(made.accounts) do
  local buckets, running, holds, spent_key = account[1], account[2], account[3], account[4]
  if not tokens then give_back(buckets, 'requests', TICKS, account[5]) end
  give_back(buckets, 'tokens', (made.tokens - (tokens or 0)) * TICKS, account[6])
  redis.call('ZREM', running, request)
  local held = redis.call('HGET', holds, request)
  if held then
    redis.call('HDEL', holds, request)
    redis.call('HINCRBY', holds, '', '-' .. held)
  end
  charge(spent_key)
end
if #KEYS == 1 then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], SETTLED, 'PX', keep_ms)
end
return 1
