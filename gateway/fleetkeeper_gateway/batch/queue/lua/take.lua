-- Takes lines under leases.
-- ARGV: 3 consumer; 4 age of a new lease in ms (0; tests turn their clock by it); 5 most lines of each
--       model that is not named; then pairs: model, most lines.
-- Returns: tick, number of the epoch, and for each turn: ID, model, then entry, line, offset, length, attempt, number of lines.
--
-- Three of four lines go to the earliest class of deadlines that waits, one to any. In a class, the key
-- that got the fewest lines is next; of its batches, the one with the earliest deadline.
local TURN = 8  -- Lines of one turn, if other keys wait.
local MAX_ATTEMPT = 999
local consumer, age = ARGV[3], ARGV[4]
-- First, so that a server that is full refuses before anything is taken.
local answer = { tick(), tonumber(ARGV[1]) }

local function lease(id, model, entries)
  local before = redis.call('INCRBY', PREFIX .. 'fence', #entries) - #entries
  local block = { id, model }
  for index, entry in ipairs(entries) do
    local line, number = fields_of(entry), before + index
    local attempt = math.min(tonumber(line.a or 0) + 1, MAX_ATTEMPT)
    redis.call('XCLAIM', key_of(id, 'lines'), GROUP, consumer, 0, entry[1],
      'IDLE', age, 'RETRYCOUNT', lease_of(number, attempt), 'JUSTID')
    for _, value in ipairs({ entry[1], line.l, line.o, line.n, attempt, number }) do
      block[#block + 1] = value
    end
  end
  redis.call('SADD', PREFIX .. 'running', id)
  answer[#answer + 1] = block
end

local function take_turn(model, most)
  local way, class = 'due', redis.call('ZRANGE', classes_key(model), 0, 0)[1]
  if not class then
    return nil
  end
  local shares = redis.call('HMGET', shares_key(model), 'due', 'any')
  if tonumber(shares[2] or 0) * 3 < tonumber(shares[1] or 0) then
    way, class = 'any', ANY
  end
  local owner = redis.call('ZRANGE', turns_key(class, model), 0, 0)[1]
  local id = redis.call('ZRANGE', batches_key(class, model, owner), 0, 0)[1]
  if redis.call('ZCARD', turns_key(ANY, model)) > 1 then
    most = math.min(most, TURN)
  end
  local found = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', most,
    'STREAMS', key_of(id, 'lines'), '>')
  local entries = found and found[1][2] or {}
  if #entries > 0 then
    lease(id, model, entries)
    redis.call('HINCRBY', shares_key(model), way, #entries)
    for _, each in ipairs({ place_of(id).class, ANY }) do
      redis.call('ZINCRBY', turns_key(each, model), #entries, owner)
    end
  end
  if #entries < most then
    unschedule(id)
  end
  return #entries
end

local function take(model, most)
  while most > 0 do
    local taken = take_turn(model, most)
    if not taken then
      return
    end
    most = most - taken
  end
end

local named, others = {}, tonumber(ARGV[5])
for index = 6, #ARGV, 2 do
  named[ARGV[index]] = true
  take(ARGV[index], tonumber(ARGV[index + 1]))
end
if others > 0 then
  for _, model in ipairs(redis.call('SMEMBERS', PREFIX .. 'models')) do
    if not named[model] then
      take(model, others)
    end
  end
end
return answer
