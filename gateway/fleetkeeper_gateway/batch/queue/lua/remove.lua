-- Forgets a batch. It writes nothing that a full server refuses. ARGV: 3 ID. Returns: 0.
local id = ARGV[3]
unschedule(id)
redis.call('SREM', PREFIX .. 'running', id)
redis.call('UNLINK', key_of(id, 'lines'), key_of(id, 'done'), key_of(id, 'meta'))
return { 0 }
