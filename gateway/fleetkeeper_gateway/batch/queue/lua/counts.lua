-- ARGV: 3 ID. Returns: 0, and if all lines of the batch were queued: total, completed, failed.
local found = redis.call('HMGET', key_of(ARGV[3], 'meta'), 'total', 'completed', 'failed', 'added')
if not found[1] or tonumber(found[4] or 0) < tonumber(found[1]) then
  return { 0 }
end
return { 0, tonumber(found[1]), tonumber(found[2] or 0), tonumber(found[3] or 0) }
