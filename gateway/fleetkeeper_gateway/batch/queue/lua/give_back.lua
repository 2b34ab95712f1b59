-- Puts lines back whose leases are still held.
-- ARGV: from 3 on: ID, entry, lease, attempts that count.
-- Returns: tick.
local wrote = false
for index = 3, #ARGV, 4 do
  local id, entry = ARGV[index], ARGV[index + 1]
  if holds(id, entry, ARGV[index + 2]) then
    requeue(id, entry, ARGV[index + 3])
    wrote = true
  end
end
return { wrote and tick() or 0 }
