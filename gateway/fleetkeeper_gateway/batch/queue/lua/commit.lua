-- Records results of lines of one batch whose leases are still held.
-- ARGV: 3 ID; then: entry, lease, line, segment:position, completed or failed.
-- Returns: tick, and for each result: counted, recorded (the line has another), lease, removed.
--
-- The first write frees memory. So a server that is full still takes results.
local id = ARGV[3]
local answer = { 0 }
local known = redis.call('EXISTS', key_of(id, 'meta')) == 1

local function record(entry, lease, line, value, counter)
  if not known then
    return 'removed'
  end
  local held = holds(id, entry, lease)
  if held then
    end_lease(id, entry)
  end
  -- The same again, by a process that did not get the answer.
  local earlier = redis.call('HGET', key_of(id, 'done'), line)
  if earlier then
    return earlier == value and 'counted' or 'recorded'
  end
  if not held then
    return 'lease'
  end
  redis.call('HSETNX', key_of(id, 'done'), line, value)
  redis.call('HINCRBY', key_of(id, 'meta'), counter, 1)
  answer[1] = 1
  return 'counted'
end

return or_lost(function()
  assert_known(is_whole(id) == known and (known or redis.call('EXISTS', key_of(id, 'lines')) == 0))
  for index = 4, #ARGV, 5 do
    answer[#answer + 1] = record(ARGV[index], ARGV[index + 1], ARGV[index + 2], ARGV[index + 3], ARGV[index + 4])
  end
  if answer[1] == 1 then
    answer[1] = tick()
  end
end, answer)
