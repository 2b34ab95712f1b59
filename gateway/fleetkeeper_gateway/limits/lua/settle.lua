-- Replaces the estimate of a request by the tokens that it used, or by what it costs at least.
-- KEYS: tokens, held, due. ARGV: request ID; tokens; TTL of a reservation in ms.
-- Without a bucket there is no limit to charge, or the server lost its data: nothing to do.
local cost = math.abs(tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0))
local least = tonumber(redis.call('HGET', KEYS[2], least_of(ARGV[1])) or 0)
redis.call('HDEL', KEYS[2], ARGV[1], least_of(ARGV[1]))
redis.call('ZREM', KEYS[3], ARGV[1])
local now = now_ms()
local level, limit = load_level(KEYS[1], nil, now)
if limit then
  local used = math.max(tonumber(ARGV[2]), least)
  save_level(KEYS[1], math.min(limit, level + cost - used), limit, now, tonumber(ARGV[3]))
end
return 'ok'
