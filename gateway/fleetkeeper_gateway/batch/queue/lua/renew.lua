-- Renews leases that are still held.
-- ARGV: 3 consumer; 4 age of a new lease in ms; then triples: ID, entry, lease.
-- Returns: tick, and the positions (from 0) of the leases that are not held.
local answer = { 0 }
local wrote = false
for index = 5, #ARGV, 3 do
  local id, entry, lease = ARGV[index], ARGV[index + 1], ARGV[index + 2]
  if holds(id, entry, lease) then
    redis.call('XCLAIM', key_of(id, 'lines'), GROUP, ARGV[3], 0, entry,
      'IDLE', ARGV[4], 'RETRYCOUNT', lease, 'JUSTID')
    wrote = true
  else
    answer[#answer + 1] = (index - 5) / 3
  end
end
if wrote then
  answer[1] = tick()
end
return answer
