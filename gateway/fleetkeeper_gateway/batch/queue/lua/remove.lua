-- Forgets a batch. It writes nothing that a full server refuses. ARGV: 3 ID.
-- Returns: 0, the lines under a lease.
local id = ARGV[3]
local running = 0
if redis.call('EXISTS', key_of(id, 'lines')) == 1 then
  running = redis.call('XPENDING', key_of(id, 'lines'), GROUP)[1]
end
unschedule(id)
redis.call('SREM', PREFIX .. 'running', id)
redis.call('UNLINK', key_of(id, 'lines'), key_of(id, 'done'), key_of(id, 'meta'))
return { 0, running }
