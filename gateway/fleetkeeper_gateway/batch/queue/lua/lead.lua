-- Takes or renews the lease of a task.
-- ARGV: 3 task; 4 name of the process; 5 time in ms. Returns: tick, 1 if it is held.
local lead = PREFIX .. 'lead:' .. ARGV[3]
local holder = redis.call('GET', lead)
if holder and holder ~= ARGV[4] then
  return { 0, 0 }
end
-- The first write is one that a server takes even if it is full: who leads ends batches, which frees memory.
redis.call('PEXPIRE', lead, ARGV[5])
redis.call('SET', lead, ARGV[4], 'PX', ARGV[5])
return { tick(), 1 }
