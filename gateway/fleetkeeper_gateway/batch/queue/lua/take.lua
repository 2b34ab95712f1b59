-- Takes lines under leases.
-- ARGV: 3 consumer; 4 age of a new lease in ms (0; tests turn their clock by it); 5 most lines of all flows
--       (KEY/MODEL) that are not named; 6 number of routes; the most lines of each; then pairs: flow, route.
-- Returns: tick, number of the epoch, and for each turn: ID, model, then entry, line, offset, length, attempt, number of lines.
--
-- Three of four lines go to the earliest class of deadlines that waits, one to any. In a class, the key
-- that got the fewest lines is next; of its batches, the one with the earliest deadline.
local TURN = 8  -- Lines of one turn, if other keys wait.
local PAGE = 16  -- Keys of one look for one with room.
local MAX_ATTEMPT = 999
local consumer, age, others = ARGV[3], ARGV[4], tonumber(ARGV[5])
local rooms, routes, models, seen = {}, {}, {}, {}
for index = 1, tonumber(ARGV[6]) do
  rooms[index] = tonumber(ARGV[6 + index])
end
for index = 7 + #rooms, #ARGV, 2 do
  routes[ARGV[index]] = tonumber(ARGV[index + 1])
  local model = string.match(ARGV[index], '^[^/]*/(.*)$')
  if not seen[model] then
    seen[model] = true
    models[#models + 1] = model
  end
end
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

local function room_of(owner, model)
  local route = routes[owner .. '/' .. model]
  return route and rooms[route] or others
end

local function use_room(owner, model, lines)
  local route = routes[owner .. '/' .. model]
  if route then
    rooms[route] = rooms[route] - lines
  else
    others = others - lines
  end
end

local function next_owner(class, model)
  local start, page = 0, nil
  repeat
    page = redis.call('ZRANGE', turns_key(class, model), start, start + PAGE - 1)
    for _, owner in ipairs(page) do
      if room_of(owner, model) > 0 then
        return owner
      end
    end
    start = start + PAGE
  until #page < PAGE
end

-- Returns the share that pays, the class and the key whose turn it is; nothing if none has room.
local function choose(model)
  local classes = redis.call('ZRANGE', classes_key(model), 0, -1)
  if not classes[1] then
    assert_known(redis.call('SISMEMBER', PREFIX .. 'models', model) == 0)
    return
  end
  local any = next_owner(ANY, model)
  if not any then
    assert_known(redis.call('EXISTS', turns_key(ANY, model)) == 1)
    return
  end
  local shares = redis.call('HMGET', shares_key(model), 'due', 'any')
  if tonumber(shares[2] or 0) * 3 < tonumber(shares[1] or 0) then
    return 'any', ANY, any
  end
  for _, class in ipairs(classes) do
    local owner = next_owner(class, model)
    if owner then
      return 'due', class, owner
    end
    assert_known(redis.call('EXISTS', turns_key(class, model)) == 1)
  end
  assert_known(false)  -- A key that waits among all waits in a class.
end

local function take_turn(model)
  local way, class, owner = choose(model)
  if not way then
    return false
  end
  local id = redis.call('ZRANGE', batches_key(class, model, owner), 0, 0)[1]
  assert_known(id and is_whole(id))
  local most = room_of(owner, model)
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
  use_room(owner, model, #entries)
  if #entries < most then
    unschedule(id)
  end
  return true
end

local function take_all()
  assert_known(redis.call('EXISTS', PREFIX .. 'fence') == 1)
  for _, model in ipairs(redis.call('SMEMBERS', PREFIX .. 'models')) do
    if not seen[model] then
      models[#models + 1] = model
    end
  end
  for _, model in ipairs(models) do
    while take_turn(model) do
    end
  end
end

return or_lost(take_all, answer)
