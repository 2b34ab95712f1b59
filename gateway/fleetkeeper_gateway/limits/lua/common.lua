-- What the scripts share. Time is the server's, so that clocks of replicas do not matter.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The field beside a reservation, with the tokens that its request costs at least.
local function least_of(id)
  return id .. '/least'
end

-- The token bucket: a hash with `level` (negative: a debt), `at` (ms) and `limit` (tokens a minute).
-- A missing bucket is full. Returns the level and the limit; no limit if none is known.
local function load_level(key, limit, now)
  local found = redis.call('HMGET', key, 'level', 'at', 'limit')
  limit = limit or tonumber(found[3])
  if not found[1] then
    return limit, limit
  end
  local elapsed = math.max(0, now - tonumber(found[2]))
  return math.min(limit, tonumber(found[1]) + elapsed * limit / 60000), limit
end

-- Keeps the bucket until it is full and no reservation can come back to it.
local function save_level(key, level, limit, now, orphan_ms)
  redis.call('HSET', key, 'level', string.format('%.17g', level), 'at', now, 'limit', limit)
  local full_ms = math.ceil((limit - level) * 60000 / math.max(1, limit))
  redis.call('PEXPIRE', key, math.min(math.max(full_ms, orphan_ms), 1e12) + 60000)
end
