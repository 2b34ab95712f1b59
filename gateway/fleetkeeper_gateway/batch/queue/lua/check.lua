-- Counts a tick, and puts lines back whose leases ran out. Their attempt counts.
-- ARGV: 3 idle time in ms after which a lease has run out; 4 ms for which the tick is kept.
-- Returns: tick, the number of models with lines that wait.
local PAGE = 100
-- The first write is one that a server takes even if it is full.
redis.call('PEXPIRE', KEYS[2], ARGV[4])

local function sweep(id)
  local lines = key_of(id, 'lines')
  assert_known(is_whole(id))
  if redis.call('XPENDING', lines, GROUP)[1] == 0 then
    redis.call('SREM', PREFIX .. 'running', id)
    return
  end
  local found
  repeat
    found = redis.call('XPENDING', lines, GROUP, 'IDLE', ARGV[3], '-', '+', PAGE)
    for _, pending in ipairs(found) do
      requeue(id, pending[1], pending[4] % 1000)
    end
  until #found < PAGE
end

local answer = { 0, 0 }
return or_lost(function()
  for _, id in ipairs(redis.call('SMEMBERS', PREFIX .. 'running')) do
    sweep(id)
  end
  answer[1], answer[2] = tick(), redis.call('SCARD', PREFIX .. 'models')
end, answer)
