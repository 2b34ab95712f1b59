-- What the queue does in Redis. ARGV: name of a function, then its arguments. PREFIX stands before.
-- Names are computed here from IDs, so one primary holds all keys; a Redis cluster would not do.
--   {ID}:chunks  stream of the chunks that wait or are held: c number. Its group is `w`.
--   {ID}:meta    hash: place (below), record
--   waiting      sorted set of the places of batches that have waiting chunks
--   emptied      set of the batches whose last chunk was done
--   running      hash: process -> time/key/lines/key/lines...
--   lead:TASK    the process that does a task
-- A place is KEY/deadline/ID/model: the places of a key are neighbors, earliest deadline first.
-- Any key may be gone. `state` makes up for `waiting`; without its stream or meta a batch is added again; the
-- others are written again within seconds.
-- A server that is full refuses a script whose first write needs memory. Only `add` begins so.
local GROUP = 'w'
local WAITING, EMPTIED = PREFIX .. 'waiting', PREFIX .. 'emptied'
local RUNNING, LEAD = PREFIX .. 'running', PREFIX .. 'lead:'
local call, pcall, queue = redis.call, redis.pcall, {}

local function keys_of(id)
  local batch = PREFIX .. '{' .. id .. '}:'
  return batch .. 'chunks', batch .. 'meta'
end

-- Returns the answer of XPENDING; an empty list if the stream of the batch is gone.
local function pending(chunks, ...)
  local found = pcall('XPENDING', chunks, GROUP, ...)
  return found.err and {} or found
end

local function held_count(chunks)
  return pending(chunks)[1] or 0
end

local function is_held(chunks, entry, process)
  return #pending(chunks, entry, entry, 1, process) > 0
end

local function schedule(id)
  local chunks, meta = keys_of(id)
  local place = call('HGET', meta, 'place')
  if place and call('XLEN', chunks) > held_count(chunks) then
    pcall('ZADD', WAITING, 0, place)  -- a full server may refuse it to `state`, which asks again
  end
end

local function drop(chunks, entry)
  call('XACK', chunks, GROUP, entry)
  call('XDEL', chunks, entry)
end

-- Lets a held chunk wait again, behind the others of its batch.
local function requeue(id, chunks, entry)
  local found = call('XRANGE', chunks, entry, entry)[1]
  drop(chunks, entry)
  if found then
    call('XADD', chunks, '*', unpack(found[2]))
  end
  schedule(id)
end

-- Returns INFO of the server, if we may use our keys.
function queue.info()
  call('EXISTS', WAITING)
  return call('INFO')
end

function queue.add(id, place, record, ...)
  local chunks, meta = keys_of(id)
  call('HSET', meta, 'place', place, 'record', record)
  pcall('XGROUP', 'CREATE', chunks, GROUP, 0, 'MKSTREAM')
  local known = {}
  for _, entry in ipairs(call('XRANGE', chunks, '-', '+')) do
    known[entry[2][2]] = true
  end
  for _, chunk in ipairs({ ... }) do
    if not known[chunk] then
      call('XADD', chunks, '*', 'c', chunk)
      known[chunk] = true
    end
  end
  schedule(id)
end

-- Returns the begin of the next page, empty at the end, then keys with waiting chunks and their running lines.
function queue.keys(from, most_age)
  local now, lines, answer = call('TIME')[1], {}, {}
  local running = call('HGETALL', RUNNING)
  for index = 1, #running, 2 do
    local at, rest = string.match(running[index + 1], '^(%d+)(.*)$')
    if math.abs(now - at) > tonumber(most_age) then
      call('HDEL', RUNNING, running[index])
    else
      for key, count in string.gmatch(rest, '/([^/]*)/(%d+)') do
        lines[key] = (lines[key] or 0) + count
      end
    end
  end
  for _ = 1, 500 do
    local place = call('ZRANGEBYLEX', WAITING, from, '+', 'LIMIT', 0, 1)[1]
    if not place then
      return { '', unpack(answer) }
    end
    local key = string.match(place, '^[^/]*')
    from = '[' .. key .. '0'  -- 0 follows the slash
    answer[#answer + 1], answer[#answer + 2] = key, lines[key] or 0
  end
  return { from, unpack(answer) }
end

-- Returns place, record, entry, chunk, entry, chunk... of a batch, or nothing.
local function take_of(place, id, process, most)
  local chunks, meta = keys_of(id)
  local kept, entries, answer = call('HMGET', meta, 'place', 'record'), {}, { place }
  if kept[1] == place then
    local found = pcall('XREADGROUP', 'GROUP', GROUP, process, 'COUNT', most, 'STREAMS', chunks, '>')
    entries = found and not found.err and found[1][2] or {}
  end
  if #entries < most or call('XLEN', chunks) <= held_count(chunks) then
    call('ZREM', WAITING, place)
  end
  answer[2] = kept[2]
  for _, entry in ipairs(entries) do
    answer[#answer + 1], answer[#answer + 2] = entry[1], entry[2][2]
  end
  return #entries, answer
end

-- Returns the begin of the next page, empty at the end, then what `take_of` does for each batch.
function queue.take(process, key, most, from, to, ...)
  local left, skip, page = tonumber(most), {}, 200
  for _, flow in ipairs({ ... }) do
    skip[flow] = true
  end
  local places = call('ZRANGEBYLEX', WAITING, from, to, 'LIMIT', 0, page)
  local answer = { #places == page and '(' .. places[page] or '' }
  for _, place in ipairs(places) do
    local id, model = string.match(place, '^[^/]*/[^/]*/([^/]*)/(.*)$')
    if left > 0 and not skip[key .. '/' .. model] then
      local count, batch = take_of(place, id, process, left)
      if count > 0 then
        answer[#answer + 1] = batch
        left = left - count
      end
    end
  end
  return answer
end

-- Does something with the chunks (ID, entry, ID, entry...) that are held; returns the positions of the others, from 0.
local function each_held(process, list, work)
  local lost = {}
  for index = 1, #list, 2 do
    local id, entry, chunks = list[index], list[index + 1], keys_of(list[index])
    if is_held(chunks, entry, process) then
      work(id, chunks, entry)
    else
      lost[#lost + 1] = (index - 1) / 2
    end
  end
  return lost
end

-- Renews chunks, and writes which lines of the process run: /key/lines/key/lines... Returns those not held.
function queue.renew(process, lines, ...)
  call('HDEL', RUNNING, process)
  if lines ~= '' then
    call('HSET', RUNNING, process, call('TIME')[1] .. lines)
  end
  return each_held(process, { ... }, function(_, chunks, entry)
    call('XCLAIM', chunks, GROUP, process, 0, entry, 'JUSTID')
  end)
end

function queue.give_back(process, ...)
  each_held(process, { ... }, requeue)
end

function queue.done(process, ...)
  each_held(process, { ... }, function(id, chunks, entry)
    drop(chunks, entry)
    if call('XLEN', chunks) == 0 then
      call('SADD', EMPTIED, id)
    end
  end)
end

-- Lets the chunks of a process wait again. Returns the cursor of the next page, 0 at the end.
function queue.release(cursor, process)
  local page = call('SCAN', cursor, 'MATCH', PREFIX .. '*:chunks', 'COUNT', 500)
  for _, chunks in ipairs(page[2]) do
    for _, found in ipairs(pending(chunks, '-', '+', 1000, process)) do
      requeue(string.match(chunks, '{(.*)}'), chunks, found[1])
    end
  end
  return { page[1] }
end

-- Returns how many chunks are held; nothing if the batch is unknown. What is idle waits again.
function queue.state(id, idle_ms)
  local chunks, meta = keys_of(id)
  if call('EXISTS', meta) == 0 then
    return {}
  end
  for _, found in ipairs(pending(chunks, 'IDLE', idle_ms, '-', '+', 500)) do
    requeue(id, chunks, found[1])
  end
  schedule(id)
  return { held_count(chunks) }
end

function queue.emptied()
  return call('SPOP', EMPTIED, 500)
end

function queue.remove(id)
  local chunks, meta = keys_of(id)
  call('ZREM', WAITING, call('HGET', meta, 'place') or '')
  call('UNLINK', meta, chunks)
  call('SREM', EMPTIED, id)
end

-- Takes or renews the lease of a task, or gives it back after 0 ms. Returns whether it is ours.
function queue.lead(task, process, ms)
  local holder = call('GET', LEAD .. task)
  if holder and holder ~= process then
    return { 0 }
  end
  call('DEL', LEAD .. task)
  if ms ~= '0' then
    call('SET', LEAD .. task, process, 'PX', ms)
  end
  return { 1 }
end

return queue[ARGV[1]](unpack(ARGV, 2))
