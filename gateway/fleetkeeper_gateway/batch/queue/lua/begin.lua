-- Begins an epoch: from here on, nothing of an earlier one is done.
-- KEYS: epoch. ARGV: number, name of the attempt, run_id of the server. Returns: 1, or 0 if a later one exists.
local number = tonumber(ARGV[1])
local found = redis.call('HMGET', KEYS[1], 'number', 'state')
local latest = tonumber(found[1] or 0)
if latest > number or (latest == number and found[2] == 'ready') then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'number', ARGV[1], 'state', 'rebuilding', 'builder', ARGV[2], 'run_id', ARGV[3], 'beat', 0)
return 1
