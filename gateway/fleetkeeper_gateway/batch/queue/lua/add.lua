-- Queues lines of a batch from a position on.
-- ARGV: 3 ID, model, owner, class, expires, total, record; 10 position; then number, offset, length of lines.
-- Returns: tick, the lines that were ever queued; -1 if the batch was removed meanwhile.
local id, first = ARGV[3], tonumber(ARGV[10])
local told = tick()
if redis.call('EXISTS', key_of(id, 'meta')) == 0 then
  if first > 0 then
    return { told, -1 }
  end
  if redis.call('EXISTS', key_of(id, 'lines'), key_of(id, 'done')) > 0 then
    return lost()
  end
  create_batch(id, ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
end
local added = tonumber(redis.call('HGET', key_of(id, 'meta'), 'added') or 0)
if added == first and #ARGV > 10 then
  for index = 11, #ARGV, 3 do
    redis.call('XADD', key_of(id, 'lines'), '*', 'l', ARGV[index], 'o', ARGV[index + 1], 'n', ARGV[index + 2])
  end
  added = added + (#ARGV - 10) / 3
  redis.call('HSET', key_of(id, 'meta'), 'added', added)
  schedule(id)
end
return { told, added }
