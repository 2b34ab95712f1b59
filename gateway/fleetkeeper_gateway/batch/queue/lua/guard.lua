-- Refuses everything in another epoch, and after a rollback.
-- KEYS: epoch, tick of this process. ARGV: number of the epoch, highest tick that this process was told.
--
-- Each script that writes counts a tick and tells it. If the server forgot a write that this process
-- was told of, it forgot the tick too. One case escapes: the loss of one write alone, under an open
-- connection, while another call is on its way that was sent before the answer. Then a line may be
-- computed twice; its results are in segments, and the one that counts is chosen there.
local function tick()
  return redis.call('INCR', KEYS[2])
end

local epoch = redis.call('HMGET', KEYS[1], 'number', 'state')
if epoch[1] ~= ARGV[1] or epoch[2] ~= 'ready' then
  return { -1, 'epoch' }
end
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[2]) then
  return { -1, 'rollback' }
end
