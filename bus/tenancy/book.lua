-- Charge what one job of a reservation cost, once, unless the reservation is settled. The cost is
-- deducted from the reservation's held money. Its place and tokens stay taken until it is settled or
-- lapses.
--
-- KEYS: the reservation; a hash of what was charged of it: billionths by job, and their sum by the
-- suffix of the currency.
-- ARGV: the reservation's request id, the job's id, its cost in billionths, ms to keep what was spent,
-- and the suffix of the cost's currency, as in reserve.lua.
-- Returns 1 if this call charged it, 0 if there was nothing to charge.

local SETTLED = 'settled'

local request, job, cost, month_ms, currency = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local kept = redis.call('GET', KEYS[1])
if not kept or kept == SETTLED then return 0 end
if redis.call('HSETNX', KEYS[2], 'job:' .. job, cost) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], currency, cost)
redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))

-- These keys are not in KEYS. They come from the reservation.
for _, account in ipairs(cmsgpack.unpack(kept).accounts) do
  local holds, spent_key = account[3], account[4] .. currency
  local held = redis.call('HGET', holds, request)
  if held then
    local nano, held_in = string.match(held, '^(%d+)(.*)$')
    if held_in == currency then
      local less = math.min(tonumber(nano), tonumber(cost))
      if less < tonumber(nano) then
        redis.call('HSET', holds, request, string.format('%.0f', nano - less) .. held_in)
      else
        redis.call('HDEL', holds, request)
      end
      redis.call('HINCRBY', holds, held_in, string.format('%.0f', -less))
    end
  end
  redis.call('INCRBY', spent_key, cost)
  redis.call('PEXPIRE', spent_key, month_ms)
end
return 1
