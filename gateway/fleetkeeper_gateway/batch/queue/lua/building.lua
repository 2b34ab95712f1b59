-- Refuses everything but the work of the process that makes this epoch.
-- KEYS: epoch. ARGV: number of the epoch, name of the attempt to make it.
local epoch = redis.call('HMGET', KEYS[1], 'number', 'state', 'builder')
if epoch[1] ~= ARGV[1] or epoch[2] ~= 'rebuilding' or epoch[3] ~= ARGV[2] then
  return 0
end
redis.call('HINCRBY', KEYS[1], 'beat', 1)
