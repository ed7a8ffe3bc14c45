-- Give back the unused part of a request's reservation, and charge its cost. Once.
--
-- KEYS: the reservation, what book.lua has charged of it; then, for a reservation that was granted
-- while Redis was unreachable, what each account has spent in the month of the request.
-- ARGV: the time in ms (empty: Redis' own), the request's id, its tokens (empty: nothing was served,
-- so it does not count as a request either), its cost in billionths, ms to remember that it is
-- settled, ms to keep what was spent, 1 if it must be remembered as it may be settled again, and the
-- suffix of the cost's currency, as in reserve.lua.
-- Returns 1 if this call settled it, 0 if there was nothing to settle.

local TICKS = 60000
local SETTLED = 'settled'

local now, request, tokens, cost = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local keep_ms, month_ms, remember, currency = ARGV[5], ARGV[6], ARGV[7] == '1', ARGV[8]
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function charge(account_key)
  local key = account_key .. currency
  if cost > 0 then
    redis.call('INCRBY', key, string.format('%.0f', cost))
    redis.call('PEXPIRE', key, month_ms)
  end
end

local kept = redis.call('GET', KEYS[1])
if kept == SETTLED then return 0 end
if not kept then
  if #KEYS == 2 then return 0 end
  for i = 3, #KEYS do charge(KEYS[i]) end
  -- The reservation may still be on its way. It then finds that it is settled.
  redis.call('SET', KEYS[1], SETTLED, 'PX', keep_ms)
  return 1
end

local made = cmsgpack.unpack(kept)
cost = cost - (tonumber(redis.call('HGET', KEYS[2], currency)) or 0)
redis.call('DEL', KEYS[2])

-- ``taken`` is the bucket's count at the reservation. Later usage lies above that. The rest is the
-- undrained part of this and earlier reservations, of which at most ``unused`` comes back. Drained
-- usage never comes back: it has made room already.
local function give_back(buckets, field, unused, per_minute, taken)
  if per_minute == 0 then return end
  local kept = redis.call('HMGET', buckets, 'at', field, field .. '_taken')
  if not kept[1] then return end
  local used, taken_now = tonumber(kept[2]), tonumber(kept[3])
  local drained = math.max(0, now - tonumber(kept[1])) * per_minute
  if unused >= 0 then
    local left = math.max(0, used - drained - (taken_now - taken) * TICKS)
    redis.call('HSET', buckets, field, used - math.min(left, unused * TICKS))
  else
    -- More was used than reserved: add it on top.
    redis.call('HSET', buckets, field, math.max(used, drained) - unused * TICKS,
      field .. '_taken', taken_now - unused)
  end
end

-- These keys are not in KEYS. They come from the reservation.
for _, account in ipairs(made.accounts) do
  local buckets, running, holds, spent_key = account[1], account[2], account[3], account[4]
  -- A reservation of an older version counts as one request.
  if not tokens then give_back(buckets, 'requests', made.requests or 1, account[5], account[6]) end
  give_back(buckets, 'tokens', made.tokens - (tokens or 0), account[7], account[8])
  redis.call('ZREM', running, request)
  local held = redis.call('HGET', holds, request)
  if held then
    redis.call('HDEL', holds, request)
    local nano, held_in = string.match(held, '^(%d+)(.*)$')
    redis.call('HINCRBY', holds, held_in, '-' .. nano)
  end
  charge(spent_key)
end
if #KEYS == 2 and not remember then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], SETTLED, 'PX', keep_ms)
end
return 1
