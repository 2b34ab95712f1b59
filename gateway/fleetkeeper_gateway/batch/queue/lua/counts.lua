-- ARGV: 3 ID. Returns: 0, and if all lines of the batch were queued: total, completed, failed.
local id = ARGV[3]
local found = redis.call('HMGET', key_of(id, 'meta'), 'total', 'completed', 'failed', 'added')
if not found[1] or tonumber(found[4] or 0) < tonumber(found[1]) then
  return { 0 }
end
local total, completed, failed = tonumber(found[1]), tonumber(found[2] or 0), tonumber(found[3] or 0)

-- Each line without a result waits where it is found, or runs where an ended lease is found.
local function check()
  assert_known(is_whole(id))
  local left = redis.call('XLEN', key_of(id, 'lines'))
  local running = redis.call('XPENDING', key_of(id, 'lines'), GROUP)[1]
  assert_known(left >= total - completed - failed)
  assert_known(left == running or is_scheduled(id))
  assert_known(running == 0 or redis.call('SISMEMBER', PREFIX .. 'running', id) == 1)
end

return or_lost(check, { 0, total, completed, failed })
