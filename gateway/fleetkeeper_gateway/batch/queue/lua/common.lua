-- What the scripts share. PREFIX stands before this text (scripts.py).
--
-- Names are computed here from IDs, so one primary holds all keys; a Redis cluster would not do.
--   {ID}:lines   stream of the lines without a result: l number, o offset, n length, a attempts
--   {ID}:done    hash: line -> segment:position of its result
--   {ID}:meta    hash: record, model, owner (the key), class, expires, total, added, completed, failed
--   running      set: batches that may have lines under a lease
--   fence        counter of the leases of this epoch
--   models, classes, turns, batches, shares   which batches wait (schedule below)
--   wake         stream of at most one entry, which wakes those who wait for lines
--
-- A lease is the stream's own pending entry: its consumer, its idle time, and as its delivery count
-- the number of the lease * 1000 + the attempt. So a running line needs no other memory.

local GROUP = 'w'
local ANY = 'any'

local function key_of(id, part)
  return PREFIX .. '{' .. id .. '}:' .. part
end

local function classes_key(model)
  return PREFIX .. 'classes:' .. model
end

local function turns_key(class, model)
  return PREFIX .. 'turns:' .. class .. ':' .. model
end

local function batches_key(class, model, owner)
  return PREFIX .. 'batches:' .. class .. ':' .. #model .. ':' .. model .. ':' .. owner
end

local function shares_key(model)
  return PREFIX .. 'shares:' .. model
end

-- A key that the server dropped by itself (an eviction, a DEL by hand) must not stop the lines of all.
-- Nothing but the store knows what it held. So the epoch ends, and the queue is rebuilt from the store.
local LOST = 'a key of the queue is gone'

local function assert_known(holds)
  if not holds then
    error(LOST, 0)
  end
end

local function lost()
  redis.call('DEL', KEYS[1])
  return { -1, LOST }
end

-- Returns the answer of a script, or a refusal if it found that a key is gone.
local function or_lost(work, answer)
  local done, problem = pcall(work)
  if done then
    return answer
  end
  if problem ~= LOST then
    error(problem, 0)
  end
  return lost()
end

-- A batch has both keys from its first to its last line.
local function is_whole(id)
  return redis.call('EXISTS', key_of(id, 'meta'), key_of(id, 'lines')) == 2
end

local function place_of(id)
  local found = redis.call('HMGET', key_of(id, 'meta'), 'model', 'owner', 'class', 'expires')
  return { model = found[1], owner = found[2], class = found[3], expires = found[4] }
end

local function is_scheduled(id)
  local place = place_of(id)
  for _, class in ipairs({ place.class, ANY }) do
    if not redis.call('ZSCORE', batches_key(class, place.model, place.owner), id)
      or not redis.call('ZSCORE', turns_key(class, place.model), place.owner) then
      return false
    end
  end
  return redis.call('ZSCORE', classes_key(place.model), place.class)
    and redis.call('SISMEMBER', PREFIX .. 'models', place.model) == 1
end

-- Lets a batch wait in its class of deadlines, and among all. A key that did not wait begins one line
-- behind the key that got the fewest: idle time earns nothing, and a key that comes again and again with
-- single lines does not pass those that wait.
local function schedule(id)
  local place = place_of(id)
  if not place.model then
    return
  end
  local new = false
  for _, class in ipairs({ place.class, ANY }) do
    local turns = turns_key(class, place.model)
    if redis.call('ZADD', batches_key(class, place.model, place.owner), 'NX', place.expires, id) == 1 then
      new = true
      local least = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2]
      redis.call('ZADD', turns, 'NX', least and tonumber(least) + 1 or 0, place.owner)
    end
  end
  if new then
    redis.call('ZADD', classes_key(place.model), place.class, place.class)
    redis.call('SADD', PREFIX .. 'models', place.model)
    redis.call('XADD', PREFIX .. 'wake', 'MAXLEN', 1, '*', 'm', place.model)
  end
end

local function unschedule(id)
  local place = place_of(id)
  if not place.model then
    return
  end
  for _, class in ipairs({ place.class, ANY }) do
    local turns, batches = turns_key(class, place.model), batches_key(class, place.model, place.owner)
    redis.call('ZREM', batches, id)
    if redis.call('EXISTS', batches) == 0 then
      redis.call('ZREM', turns, place.owner)
    end
    if redis.call('EXISTS', turns) == 0 then
      redis.call('ZREM', classes_key(place.model), class)
    end
  end
  if redis.call('EXISTS', turns_key(ANY, place.model)) == 0 then
    redis.call('SREM', PREFIX .. 'models', place.model)
    redis.call('DEL', shares_key(place.model))
  end
end

local function create_batch(id, model, owner, class, expires, total, record)
  redis.call('HSET', key_of(id, 'meta'), 'model', model, 'owner', owner, 'class', class,
    'expires', expires, 'total', total, 'record', record)
  if redis.call('EXISTS', key_of(id, 'lines')) == 0 then
    redis.call('XGROUP', 'CREATE', key_of(id, 'lines'), GROUP, '0', 'MKSTREAM')
  end
end

-- The number by which the server keeps a lease.
local function lease_of(number, attempt)
  return string.format('%.0f', number * 1000 + attempt)
end

local function holds(id, entry, lease)
  if redis.call('EXISTS', key_of(id, 'lines')) == 0 then
    return false
  end
  local found = redis.call('XPENDING', key_of(id, 'lines'), GROUP, entry, entry, 1)[1]
  return found ~= nil and string.format('%.0f', found[4]) == lease
end

local function fields_of(entry)
  local fields = {}
  for index = 1, #entry[2], 2 do
    fields[entry[2][index]] = entry[2][index + 1]
  end
  return fields
end

local function end_lease(id, entry)
  redis.call('XACK', key_of(id, 'lines'), GROUP, entry)
  redis.call('XDEL', key_of(id, 'lines'), entry)
end

-- Puts a running line at the end of its batch.
local function requeue(id, entry, attempts)
  local lines = key_of(id, 'lines')
  local found = redis.call('XRANGE', lines, entry, entry)[1]
  end_lease(id, entry)
  if found then
    local line = fields_of(found)
    redis.call('XADD', lines, '*', 'l', line.l, 'o', line.o, 'n', line.n, 'a', attempts)
    schedule(id)
  end
end
