-- Lease up to `count` jobs to a worker: lapsed leases first, then new entries by priority and tenant.
-- ARGV: base, worker, request number, count, lease (ms)
-- Reply: {array of {id, payload, "attempt,crashes,logged events,started (ms),now (ms),deadline (ms, 0 none),retries,
--        max_retries"}, ms until something falls due (0 there is more now, -1 nothing known), paused (0 | 1: nothing
--        new is granted)}
-- Again: a repeated request number is answered with what the first call granted and this worker still holds, leased from
--        now on: the reply may have been lost in an outage longer than a lease. One below the last number, which nobody
--        waits for any more, is granted nothing.
local worker, number, count, lease_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local memo = base .. 'lease:' .. worker
local MOST_CLEARED = 1000 -- entries that are no jobs, cleared in one call: a script holds up the whole server
local MOST_RAW = 65536 -- bytes kept of such an entry
local MOST_BYTES = 16 * 1024 * 1024 -- payload granted in one call
local now = server_ms()
local granted, granted_bytes = {}, 0
local said = {} -- id and attempt of what is granted, to be said again
local held = {} -- what ZADD takes: when each lease granted here lapses, by a full lease from now

-- What is known of a job, in one read; nothing without one. A payload that somebody took out of the hash is empty here,
-- which is no job, and ends as that.
local function read_job(id)
  local f = redis.pcall('HMGET', job_key(id), 'cancel', 'worker', 'payload', unpack(STANDING))
  local known = standing_of(id, f, 4, now) or {}
  known.cancel, known.worker, known.payload = f[1], f[2], f[3] or ''
  return known
end

-- A job that nobody ever had and that has no deadline, in six fields in place of thirteen, which saves a tenth of a
-- lease's time; nil for any other, and for what is no job.
local function read_new(id, entry)
  local f = redis.pcall('HMGET', job_key(id), 'state', 'entry', 'about', 'attempt', 'deadline', 'payload')
  local about = f[1] == 'queued' and f[2] == entry and not f[4] and not f[5] and about_of(f[3])
  return about and {state = 'queued', new = true, entry = entry, about = about, attempt = 0, crashes = 0, retries = 0,
    deadline = 0, started = 0, payload = f[6] or ''}
end

-- The numbers of a lease in one text, which most leases of a call have in common: ten parts a lease cost a tenth more.
local of_new = {}
local function numbers_of(known, logged)
  local most = known.about.max_retries
  local text = known.new and of_new[most] or table.concat({known.attempt, known.crashes, logged, known.started, now,
    known.deadline, known.retries, most}, ',')
  if known.new then of_new[most] = text end
  return text
end

-- A lease as it is told; it lasts from now on. Nobody has logged anything of a first attempt.
local function describe(id, known)
  held[#held + 1], held[#held + 2] = now + lease_ms, id
  granted_bytes = granted_bytes + #known.payload
  local logged = known.attempt > 1 and log_length(id) or 0
  return {id, known.payload, numbers_of(known, logged)}
end

local function note_leases()
  for from, to in pieces(held) do redis.call('ZADD', leases, unpack(held, from, to)) end
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
if last and string.sub(last, 1, #number + 1) == number .. ',' then
  local again = {}
  for id, attempt in string.gmatch(string.sub(last, #number + 2), '([^,]+),(%d+)') do
    local known = read_job(id)
    if known.state == 'running' and known.worker == worker and known.attempt == tonumber(attempt) then
      again[#again + 1] = describe(id, known)
    end
  end
  note_leases()
  return {again, #again < count and next_ms() or -1, 0}
end

if last and (tonumber(number) or 0) < (tonumber(string.match(last, '^%d+')) or 0) then return {{}, -1, 0} end

local function has_room()
  return #granted < count and granted_bytes < MOST_BYTES and events_read <= MOST_EVENTS and num_ended < MOST_ENDED
end

local function grant(id, known)
  known.attempt, known.started = known.attempt + 1, known.started > 0 and known.started or now
  redis.call('HSET', job_key(id), 'attempt', known.attempt, 'state', 'running', 'worker', worker,
    'started', known.started)
  if known.cancel then redis.call('PUBLISH', base .. 'control', 'cancel:' .. id) end
  said[#said + 1], said[#said + 2] = id, known.attempt
  granted[#granted + 1] = describe(id, known)
end

local function overdue(id, known)
  return known.deadline > 0 and known.deadline <= now and TERMINAL[expire(id, now).state]
end

local function reclaim()
  local lapsed = redis.call('ZRANGE', leases, '-inf', now, 'BYSCORE', 'LIMIT', 0, count)
  for _, id in ipairs(lapsed) do
    if not has_room() then break end
    local known = read_job(id)
    if not known.state then
      lose(id, '')
    elseif TERMINAL[known.state] then
      redis.call('ZREM', leases, id)
    elseif not (known.cancel and cancel_unowned(id, 'cancelled after its worker was lost', now))
      and not overdue(id, known) then
      redis.pcall('XCLAIM', stream_key(known.about.priority, known.about.tenant), GROUP, worker, 0, known.entry, 'JUSTID')
      grant(id, known)
    end
  end
  return #lapsed == count
end

-- Undelivered entries of a stream. The group is made again (from the start) if it is gone.
local function read_entries(stream, most)
  local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', most, 'STREAMS', stream, '>')
  if type(read) == 'table' and read.err then
    if redis.call('TYPE', stream).ok ~= 'stream' then return {} end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', most, 'STREAMS', stream, '>')
  end
  return read and read[1] and read[1][2] or {}
end

-- Grant an entry's job, or clear away what is no job. An entry that was read is delivered, so a job for which there is
-- no room any more is put with those that were handed back.
local function settle(priority, tenant, entry)
  local fields, id = entry[2] or {}, nil
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then id = fields[i + 1] end
  end
  local known = id and (read_new(id, entry[1]) or read_job(id))
  if not known or not known.state then
    local raw = string.sub(cjson.encode(fields), 1, MOST_RAW)
    if id then lose(id, raw) else redis.call('XADD', dead, '*', 'id', '', 'reason', 'not_a_job', 'raw', raw) end
    drop_entries(priority, tenant, {entry[1]})
  elseif known.state ~= 'queued' or known.entry ~= entry[1] then
    drop_entries(priority, tenant, {entry[1]}) -- an entry somebody copied: its job has one of its own
  elseif not has_room() then
    redis.call('ZADD', leases, 0, id)
  elseif not overdue(id, known) then
    grant(id, known)
  end
end

-- Of every 8 picks, one looks at the low priority first and one at the normal one: a guaranteed share.
local ORDER = {high = {'high', 'normal', 'low'}, normal = {'normal', 'high', 'low'}, low = {'low', 'normal', 'high'}}
local function order_of(pick)
  if pick % 8 == 7 then return ORDER.low end
  if pick % 8 == 3 then return ORDER.normal end
  return ORDER.high
end

-- Picks in a row: the first priority with work, its tenant with the least virtual time. Up to `most` where they are
-- certain to be the same tenant's, since no other waits. Returns how many entries were taken; 0 when there is no work.
local function pick(number_of_pick, most)
  for _, priority in ipairs(order_of(number_of_pick)) do
    local tenants = base .. 'tenants:' .. priority
    local first = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    while first[1] do
      local tenant, virtual_time, cost = first[1], number_of(first[2]), cost_of(first[1])
      local entries = read_entries(stream_key(priority, tenant), most)
      if #entries > 0 then
        redis.call('HSET', meta, 'vt:' .. priority, virtual_time + (#entries - 1) * cost)
        redis.call('ZADD', tenants, 'XX', virtual_time + #entries * cost, tenant)
        for _, entry in ipairs(entries) do settle(priority, tenant, entry) end
        return #entries
      end
      redis.call('ZREM', tenants, tenant)
      first = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    end
  end
  return 0
end

local function tenants_waiting()
  local number = 0
  for priority in pairs(ORDER) do number = number + redis.call('ZCARD', base .. 'tenants:' .. priority) end
  return number
end

-- Grant what there is room for. Returns whether there may be more. `from`: how many picks there have been.
local function grant_new(from)
  local picks, limit = from, from + count + MOST_CLEARED
  local alone = tenants_waiting() == 1
  while has_room() and picks < limit do
    local taken = pick(picks, alone and count - #granted or 1)
    if taken == 0 then break end
    picks = picks + taken
  end
  if picks > from then redis.call('HSET', meta, 'picks', picks) end
  return picks >= limit or not has_room()
end

local picks = refused_first()
local more = release_due(now)
more = expire_overdue(now) or more
local paused = redis.call('HGET', meta, 'paused') == '1'
if not paused then
  more = reclaim() or more
  more = grant_new(picks) or more
  note_leases()
end
local falls_due = -1
if #granted < count then
  falls_due = more and not paused and 0 or next_ms()
  if falls_due ~= 0 then redis.call('HSET', meta, 'hungry', 1) end
end

if #granted > 0 then
  redis.call('SET', memo, number .. ',' .. table.concat(said, ','), 'PX', math.max(lease_ms, 60000))
end
return {granted, falls_due, paused and 1 or 0}
