-- Lease up to `count` jobs to a worker: lapsed leases first, then new entries by priority and tenant.
-- ARGV: base, worker, request number, count, lease (ms)
-- Reply: {array of {id, attempt, crashes, logged events, started (ms), now (ms), payload, deadline (ms, 0 none),
--        retries, max_retries (-1 the default)}, ms until something falls due (0 there is more now, -1 nothing known)}
-- Again: a repeated request number is answered with what the first call granted and this worker still holds.
local worker, number, count, lease_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local memo = base .. 'lease:' .. worker
local MOST_CLEARED = 1000 -- entries that are no jobs, cleared in one call: a script holds up the whole server
local MOST_RAW = 65536 -- bytes kept of such an entry
local MOST_BYTES = 16 * 1024 * 1024 -- payload granted in one call
local now = server_ms()
local granted, granted_bytes = {}, 0

-- A payload that somebody took out of the hash is empty here, which is no job, and ends as that.
local function describe(id)
  local f = redis.call('HMGET', job_key(id), 'attempt', 'crashes', 'started', 'payload', 'deadline', 'retries',
    'max_retries')
  local payload = f[4] or ''
  granted_bytes = granted_bytes + #payload
  return {id, tonumber(f[1]), tonumber(f[2]), redis.call('LLEN', base .. 'log:' .. id), tonumber(f[3]), now, payload,
    tonumber(f[5] or 0), tonumber(f[6] or 0), tonumber(f[7] or -1)}
end

-- How long until something falls due. Not what is due already: a paused queue would be asked again and again.
local function next_ms()
  local soonest = -1
  for _, times in ipairs({leases, delayed, deadlines}) do
    local first = redis.call('ZRANGE', times, '(' .. now, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    if first[2] and (soonest < 0 or first[2] - now < soonest) then soonest = first[2] - now end
  end
  return soonest
end

local last = redis.call('GET', memo)
if last then
  local said = cjson.decode(last)
  if said.number == number then
    local again = {}
    for _, grant in ipairs(said.grants) do
      local f = redis.call('HMGET', job_key(grant[1]), 'state', 'worker', 'attempt')
      if f[1] == 'running' and f[2] == worker and tonumber(f[3]) == grant[2] then
        again[#again + 1] = describe(grant[1])
      end
    end
    return {again, #again < count and next_ms() or -1}
  end
end

local function has_room()
  return #granted < count and granted_bytes < MOST_BYTES and events_read <= MOST_EVENTS
end

local function grant(id)
  local job = job_key(id)
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('HSET', job, 'state', 'running', 'worker', worker)
  redis.call('HSETNX', job, 'started', now)
  redis.call('ZADD', leases, now + lease_ms, id)
  granted[#granted + 1] = describe(id)
end

-- Fields of a job; none where somebody put another type in its place, so that no entry can stop the queue.
local function fields_of(id, ...)
  local f = redis.pcall('HMGET', job_key(id), ...)
  return f.err and {} or f
end

local function reclaim()
  local lapsed = redis.call('ZRANGE', leases, '-inf', now, 'BYSCORE', 'LIMIT', 0, count)
  for _, id in ipairs(lapsed) do
    if not has_room() then break end
    local f = fields_of(id, 'state', 'cancel', 'priority', 'tenant', 'entry')
    if not f[1] or TERMINAL[f[1]] then
      redis.call('ZREM', leases, id)
    elseif f[2] then
      cancel_unowned(id, 'cancelled after its worker was lost', now)
    elseif not expire(id, now) then
      redis.pcall('XCLAIM', stream_key(f[3], f[4]), GROUP, worker, 0, f[5], 'JUSTID')
      grant(id)
    end
  end
  return #lapsed == count
end

-- One undelivered entry of a stream, or nil. The group is made again (from the start) if it is gone.
local function read_entry(stream)
  local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
  if type(read) == 'table' and read.err then
    if redis.call('TYPE', stream).ok ~= 'stream' then return nil end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  if not read or not read[1] then return nil end
  return read[1][2][1]
end

-- Take one entry off a stream: grant its job, or clear away what is no job. False when the stream has none.
local function take(priority, tenant)
  local entry = read_entry(stream_key(priority, tenant))
  if not entry then return false end
  local fields, id = entry[2] or {}, nil
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then id = fields[i + 1] end
  end
  local f = id and fields_of(id, 'state', 'cancel', 'entry')
  if not f or not f[1] then
    redis.call('XADD', dead, '*', 'id', id or '', 'reason', id and 'lost_payload' or 'not_a_job',
      'raw', string.sub(cjson.encode(fields), 1, MOST_RAW))
    drop_entry(priority, tenant, entry[1])
  elseif f[1] ~= 'queued' or f[3] ~= entry[1] then
    drop_entry(priority, tenant, entry[1]) -- an entry somebody copied: its job has one of its own
  elseif not expire(id, now) then
    grant(id)
  end
  return true
end

-- Of every 8 picks, one looks at the low priority first and one at the normal one: a guaranteed share.
local ORDER = {high = {'high', 'normal', 'low'}, normal = {'normal', 'high', 'low'}, low = {'low', 'normal', 'high'}}
local function order_of(pick)
  if pick % 8 == 7 then return ORDER.low end
  if pick % 8 == 3 then return ORDER.normal end
  return ORDER.high
end

-- One pick: the first priority with work, its tenant with the least virtual time. False when there is no work.
local function pick(number_of_pick)
  for _, priority in ipairs(order_of(number_of_pick)) do
    local tenants = base .. 'tenants:' .. priority
    local first = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    while first[1] do
      if take(priority, first[1]) then
        redis.call('HSET', meta, 'vt:' .. priority, first[2])
        redis.call('ZADD', tenants, 'XX', first[2] + cost_of(first[1]), first[1])
        return true
      end
      redis.call('ZREM', tenants, first[1])
      first = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    end
  end
  return false
end

release_due(now)
expire_overdue(now)
local more = false
if redis.call('HGET', meta, 'paused') ~= '1' then
  more = reclaim()
  local picks = redis.call('HINCRBY', meta, 'picks', 0) -- refused where memory is full; reading an entry is not
  local from = picks
  local limit = from + count + MOST_CLEARED
  while has_room() and picks < limit and pick(picks) do picks = picks + 1 end
  if picks > from then redis.call('HSET', meta, 'picks', picks) end
  more = more or picks == limit or not has_room()
end
local falls_due = -1
if #granted < count then
  falls_due = more and 0 or next_ms()
  if not more then redis.call('HSET', meta, 'hungry', 1) end
end

local grants = {}
for i, g in ipairs(granted) do grants[i] = {g[1], g[2]} end
if #grants > 0 then
  redis.call('SET', memo, cjson.encode({number = number, grants = grants}), 'PX', math.max(lease_ms, 60000))
end
return {granted, falls_due}
