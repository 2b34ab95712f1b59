-- Renews the leases of running requests. A slot that the server lost comes back.
-- KEYS: slots. ARGV: lease in ms; request IDs.
local lease_ms = tonumber(ARGV[1])
local deadline = now_ms() + lease_ms
for index = 2, #ARGV do
  redis.call('ZADD', KEYS[1], deadline, ARGV[index])
end
redis.call('PEXPIRE', KEYS[1], 2 * lease_ms)
return 'ok'
