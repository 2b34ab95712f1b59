-- Restores a part of a batch. Without parts it only shows that the work goes on.
-- ARGV: 3 ID, model, owner, class, expires, total, record; 10 completed, failed; 12 number of results;
--       then pairs of results: line, segment:position; then lines: number, offset, length. Returns: 1.
if #ARGV == 2 then
  return 1
end
local id, results = ARGV[3], tonumber(ARGV[12])
create_batch(id, ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
redis.call('HSET', key_of(id, 'meta'), 'added', ARGV[8], 'completed', ARGV[10], 'failed', ARGV[11])
local lines = 13 + 2 * results
for index = 13, lines - 1, 2 do
  redis.call('HSET', key_of(id, 'done'), ARGV[index], ARGV[index + 1])
end
for index = lines, #ARGV, 3 do
  redis.call('XADD', key_of(id, 'lines'), '*', 'l', ARGV[index], 'o', ARGV[index + 1], 'n', ARGV[index + 2])
end
if lines <= #ARGV then
  schedule(id)
end
return 1
