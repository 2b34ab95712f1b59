-- Admits a request under all its limits, or takes nothing.
-- KEYS: requests of this window, of the one before, tokens, held, due, slots.
-- ARGV: request ID; requests in a window, tokens a minute, concurrency (-1: no limit); tokens;
--       window in seconds; lease and TTL of a reservation in ms.
-- Returns: admitted, running, level, and the requests of the window before, the ms until it counts
-- no more, and the same of this window. One string: several values cost the client more to parse.
--
-- The first write is always one that a full server refuses: a server that is full is then full for
-- every request, whichever limits it has.
local id = ARGV[1]
local max_requests, max_tokens, max_running = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local window_s, lease_ms, orphan_ms = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local now = now_ms()

local running = 0
if max_running >= 0 then
  running = redis.call('ZCOUNT', KEYS[6], '(' .. now, '+inf')
end

local level, cost, orphans, stale = 0, 0, {}, {}
if max_tokens >= 0 then
  level = load_level(KEYS[3], max_tokens, now)
  -- More than a bucket holds could never be admitted. What it really used is charged afterwards.
  cost = math.min(tonumber(ARGV[5]), max_tokens)
  orphans = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now, 'LIMIT', 0, 100)
  for _, orphan in ipairs(orphans) do
    -- Negative: the request has ended, and its tokens were not counted. Its estimate stands.
    level = level + math.max(0, tonumber(redis.call('HGET', KEYS[4], orphan) or 0))
    stale[#stale + 1] = orphan
    stale[#stale + 1] = least_of(orphan)
  end
  level = math.min(level, max_tokens)
end

-- Sums of fractions may miss a whole number by very little. EPSILON in rules.py is the same.
local admitted = (max_running < 0 or running < max_running)
  and (max_tokens < 0 or (max_tokens > 0 and level >= cost - 1e-6))
if admitted and max_requests >= 0 then
  admitted = acquire_request({KEYS[2], KEYS[1]}, {max_requests, window_s, 1}) and true or false
end

if max_tokens >= 0 and (admitted or #orphans > 0) then
  if admitted then
    level = level - cost
  end
  save_level(KEYS[3], level, max_tokens, now, orphan_ms)
  if #orphans > 0 then
    redis.call('HDEL', KEYS[4], unpack(stale))
    redis.call('ZREM', KEYS[5], unpack(orphans))
  end
end
if admitted and max_tokens >= 0 then
  redis.call('HSET', KEYS[4], id, string.format('%.17g', cost))
  redis.call('ZADD', KEYS[5], now + orphan_ms, id)
  redis.call('PEXPIRE', KEYS[4], orphan_ms + 60000)
  redis.call('PEXPIRE', KEYS[5], orphan_ms + 60000)
end
if admitted and max_running >= 0 then
  running = running + 1
  redis.call('ZADD', KEYS[6], now + lease_ms, id)
  redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', now)
  redis.call('PEXPIRE', KEYS[6], 2 * lease_ms)
end

local window = {}
if max_requests >= 0 then
  window = request_window({KEYS[2], KEYS[1]}, {window_s})
end
return table.concat({
  admitted and 1 or 0, running, string.format('%.17g', level),
  window[1] or 0, window[2] or 0, window[3] or 0, window[4] or 0,
}, ' ')
