-- Ends a request: gives its slot back, and its tokens too if it was not sent.
-- KEYS: tokens, held, due, slots. ARGV: request ID; 1 if it was sent; TTL of a reservation in ms; tokens
--       that it costs at least, also if fewer are counted (0 from older replicas, which do not send it).
redis.call('ZREM', KEYS[4], ARGV[1])
local cost = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
if cost > 0 and ARGV[2] == '1' then
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%.17g', -cost))
  local least = tonumber(ARGV[4] or 0)
  if least > 0 then
    redis.call('HSET', KEYS[2], least_of(ARGV[1]), math.min(least, cost))
  end
elseif cost > 0 then
  local now = now_ms()
  local level, limit = load_level(KEYS[1], nil, now)
  if limit then
    save_level(KEYS[1], math.min(limit, level + cost), limit, now, tonumber(ARGV[3]))
  end
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
return 'ok'
