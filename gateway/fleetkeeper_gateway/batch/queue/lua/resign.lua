-- Ends the lease of a task, if this process holds it.
-- ARGV: 3 task; 4 name of the process. Returns: 0.
local lead = PREFIX .. 'lead:' .. ARGV[3]
if redis.call('GET', lead) == ARGV[4] then
  redis.call('DEL', lead)
end
return { 0 }
