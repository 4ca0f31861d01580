-- Put in front of every script. All keys of a queue share one hash tag, so they are built from its base here;
-- each script declares KEYS[1] = <base>meta, which places it on the queue's shard.
--
--   <base>meta             hash    fingerprint, entries, bytes, max_entries, max_bytes, picks, vt:<priority>,
--                                  paused, hungry (a worker found less than it asked for, and waits for a wake-up),
--                                  sweep (cursor of the heartbeats' search for stray jobs), forgotten (server ms: when workers
--                                  not heard of were last looked for), epoch (a mark that no script
--                                  touches: gone with all data, see broker/epoch.py)
--   <base>job:<id>         hash    payload digest about state entry bytes; once leased attempt worker started (ms, server
--                                  clock); where there is such a thing cancel crashes retries not_before deadline (ms)
--                                  letter requeued history. `about` is what never changes of it:
--                                  "priority,tenant,run,ttl,max_retries", the last two numbers, each as it was submitted.
--                                  `entry` is that of its stream; once it has ended, that of its run's
--   <base>jobs:<p>:<t>     stream  {id}; consumer group "workers"; deleted when empty
--   <base>tenants:<p>      zset    tenant -> virtual time, while it has undelivered entries
--   <base>leases           zset    id -> server time (ms) at which the lease lapses; 0 = handed back
--   <base>delayed          zset    id -> server time (ms) before which nobody may have it: jobs with a time of their
--                                  own, which have no entry yet, and jobs that are tried again, which have one
--   <base>deadlines        zset    id -> server time (ms) at which its deadline is looked at
--   <base>weights          hash    tenant -> share of its picks beside a tenant of weight 1
--   <base>lease:<worker>   string  the last lease reply of a worker, so that it can be repeated; expires
--   <base>log:<id>         list    events, index = seq - 1
--   <base>tokens:<id>      channel the same events
--   <base>result:<id>      string  the result, JSON, of a job that is of no bulk run
--   <base>done:<run>       stream  {id: result, ...}: completions of one bulk run, an entry for those that ended together;
--                                  expires with the last of them
--   <base>batches          zset    batch id -> server time (ms) of its submission
--   <base>batch:<id>       hash    of a batch: status ending slice total completed failed errors folder, times (s, server
--                                  clock), submitted_by, webhook: see batch_*.lua and broker/batches.py
--   <base>batches-swept    string  there for 30 s after somebody looked at all batches: broker/batches.py
--   <base>dead             stream  {id, reason, raw, attempt, worker}: dead letters
--   <base>workers          hash    worker -> "<server ms> <json>"
--   <base>loading          hash    worker -> "<server ms> <since, server ms> <model>": it loads its first model; expires
--   <base>control          channel wake, cancel:<id>
--
-- ARGV[1] is always the base.
--
-- A server whose memory is full refuses a script's first write, if that may take more, and none behind a write: a script
-- is run whole or not at all. Publishing is no write and is never refused: so nothing is published before the first write.

-- A value of another type in a place of the queue's own, which somebody put there, is of no use to anyone: it goes, and the
-- command meets an empty place. A count that is none is 0. That is seen where a command fails: the others pay nothing.
local server, try, type = redis, redis.pcall, type
local redis = {pcall = try}
local function run_again(fault, command, key, ...)
  if string.find(fault, 'WRONGTYPE', 1, true) then
    server.call('DEL', key)
  elseif command == 'HINCRBY' and (string.find(fault, 'hash value', 1, true) or string.find(fault, 'overflow', 1, true)) then
    server.call('HDEL', key, (...))
  end
  return server.call(command, key, ...)
end

function redis.call(...)
  local reply = try(...)
  if type(reply) == 'table' and reply.err then return run_again(reply.err, ...) end
  return reply
end

local base = ARGV[1]
local meta = base .. 'meta'
local leases = base .. 'leases'
local delayed = base .. 'delayed'
local deadlines = base .. 'deadlines'
local dead = base .. 'dead'
local GROUP = 'workers'
local TERMINAL = {succeeded = true, failed = true, cancelled = true, expired = true, dead = true}

-- The server's clock in ms; no client clock ever decides anything.
local function server_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function job_key(id) return base .. 'job:' .. id end
local function stream_key(priority, tenant) return base .. 'jobs:' .. priority .. ':' .. tenant end

-- A whole number that Lua writes again as it stands; nil or false for anything else.
local function whole(text)
  return text and #text <= 14 and string.find(text, '^%d+$') and (#text == 1 or string.byte(text) ~= 48) and tonumber(text)
end

-- What somebody may have written by hand where a number belongs, as one that can be reckoned with; `otherwise` (0) where
-- it is none.
local function number_of(text, otherwise)
  local number = tonumber(text)
  return number and math.abs(number) <= 2 ^ 53 and number or otherwise or 0
end

-- The field `about`, read: jobs of one run mostly have the same, which is taken apart once. Nil for what is none.
local PRIORITIES = {high = true, normal = true, low = true}
local abouts = {}
local function about_of(text)
  text = text or ''
  if not abouts[text] then
    local priority, tenant, run, ttl, max_retries = string.match(text,
      '^([^,]*),([^,]*),([^,]*),(%d+),(%d+)$')
    abouts[text] = PRIORITIES[priority or ''] and whole(ttl) and whole(max_retries)
      and {priority = priority, tenant = tenant, run = run, ttl = ttl, max_retries = max_retries,
        kept_ms = ttl == '0' and math.huge or tonumber(ttl)}
  end
  return abouts[text]
end

-- Where pieces of a list begin and end: Lua's `unpack` gives out no more than some 8,000 values at a time.
local MOST_UNPACKED = 4000
local function pieces(list)
  local from = 1 - MOST_UNPACKED
  return function()
    from = from + MOST_UNPACKED
    if from <= #list then return from, math.min(from + MOST_UNPACKED - 1, #list) end
  end
end

-- Some of the script's arguments.
local function args_from(first, last)
  local args = {}
  for i = first, last do args[i - first + 1] = ARGV[i] end
  return args
end

-- Publish events to whoever watches the job.
local function tell(id, events)
  local channel = base .. 'tokens:' .. id
  for _, event in ipairs(events) do redis.call('PUBLISH', channel, event) end
end

-- Append the events that are not logged yet and publish them; `first` is the seq of events[1]. Returns the log's length.
local function push_events(id, logged, first, events)
  local fresh = events
  if first <= logged then
    fresh = {}
    for i = logged - first + 2, #events do fresh[#fresh + 1] = events[i] end
  end
  if #fresh == 0 then return logged end
  for from, to in pieces(fresh) do logged = redis.call('RPUSH', base .. 'log:' .. id, unpack(fresh, from, to)) end
  tell(id, fresh)
  return logged
end

-- How many events of a job are logged. What somebody put in the log's place is none, and goes.
local function log_length(id)
  local logged = redis.pcall('LLEN', base .. 'log:' .. id)
  if type(logged) == 'number' then return logged end
  redis.call('DEL', base .. 'log:' .. id)
  return 0
end

-- How many events of a job are logged, and whether those from `first` on would leave no gap.
local function logged_before(id, first)
  local logged = log_length(id)
  return logged, first <= logged + 1
end

-- What one pick of a tenant costs it in virtual time. A weight that is none, since somebody wrote it by hand, is 1.
local function cost_of(tenant)
  local weight = number_of(redis.call('HGET', base .. 'weights', tenant), 1)
  return weight >= 0.001 and 1 / weight or 1
end

-- Only a worker that found too little is told: at 10,000 submits a second nobody wants 10,000 wake-ups.
local function wake_hungry()
  if redis.call('HDEL', meta, 'hungry') == 1 then redis.call('PUBLISH', base .. 'control', 'wake') end
end

-- Give a job an entry; returns its id. A tenant that comes (back) starts one pick behind the virtual time of the last one
-- (start-time fair queueing): it neither waits for the others' past nor spends its own idle time as credit. Not level with
-- it: tenants that submit one job at a time and come back after each would then always be first.
local came = {} -- streams whose tenants have been seen to by this script
local function put_in_line(id, about)
  local stream = stream_key(about.priority, about.tenant)
  if not came[stream] then
    came[stream] = true
    if redis.call('EXISTS', stream) == 0 then
      redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    end
    local virtual_time = number_of(redis.call('HGET', meta, 'vt:' .. about.priority))
    redis.call('ZADD', base .. 'tenants:' .. about.priority, 'NX', virtual_time + cost_of(about.tenant), about.tenant)
  end
  return redis.call('XADD', stream, '*', 'id', id)
end

-- The dead letter of that name, {entry id, fields}: its entry's id, or its job's. Nil without one.
local function find_letter(name)
  local letter = string.match(name, '^%d+%-%d+$') and redis.pcall('XRANGE', dead, name, name)[1]
  if letter then return letter end
  local entry = redis.pcall('HGET', job_key(name), 'letter')
  return type(entry) == 'string' and redis.pcall('XRANGE', dead, entry, entry)[1]
end

-- A flat array of names and values as a table.
local function table_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- Drop entries of a stream for good. The stream goes with its last entry, and its tenant with the stream.
local function drop_entries(priority, tenant, entries)
  local stream = stream_key(priority, tenant)
  for from, to in pieces(entries) do
    redis.pcall('XACK', stream, GROUP, unpack(entries, from, to))
    redis.call('XDEL', stream, unpack(entries, from, to))
  end
  if redis.call('XLEN', stream) == 0 then
    came[stream] = nil
    redis.call('DEL', stream)
    redis.call('ZREM', base .. 'tenants:' .. priority, tenant)
  end
end

-- Forget a worker that has gone in the groups of streams that have work, unless jobs of its are pending there. The other
-- streams go themselves; a stream that always has work would remember every worker that ever read of it.
local MOST_STREAMS = 100 -- of each priority
local function forget_consumer(worker)
  for priority in pairs(PRIORITIES) do
    for _, tenant in ipairs(redis.call('ZRANGE', base .. 'tenants:' .. priority, 0, MOST_STREAMS - 1)) do
      local stream = stream_key(priority, tenant)
      local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1, worker)
      if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', stream, GROUP, worker) end
    end
  end
end

-- Whether a job's field `entry` is one: '' or the id of an entry.
local function is_entry(text)
  if not text or text == '' then return text == '' end
  local dash = string.find(text, '^%d+%-%d+$') and string.find(text, '-', 1, true)
  return dash and dash <= 20 and #text - dash < 20
end

-- `about` as a job's payload has it, which says the same, for a job whose field somebody spoilt.
local WEEK_MS = 7 * 24 * 3600 * 1000
local function about_again(job)
  local f = redis.call('HMGET', job, 'payload', 'requeued')
  local read, said = pcall(cjson.decode, f[1] or '')
  if not read or type(said) ~= 'table' then said = {} end
  local function text_of(name, otherwise) return type(said[name]) == 'string' and said[name] or otherwise end
  local ttl = said.result_ttl_s == nil and WEEK_MS or (tonumber(said.result_ttl_s) or 0) * 1000
  local text = table.concat({text_of('priority', 'normal'), text_of('tenant', 'default'), f[2] and '' or text_of('run', ''),
    string.format('%.0f', ttl), '0'}, ',')
  if not about_of(text) then text = 'normal,default,,' .. WEEK_MS .. ',0' end
  redis.call('HSET', job, 'about', text)
  return about_of(text)
end

-- The entry of a job whose field somebody spoilt; '' where there is none among the oldest, of which those of jobs that
-- were leased are. Any other is dropped when it is read.
local function find_entry(id, about)
  for _, entry in ipairs(redis.call('XRANGE', stream_key(about.priority, about.tenant), '-', '+', 'COUNT', 1000)) do
    if table_of(entry[2]).id == id then return entry[1] end
  end
  return ''
end

-- What must be known of a job to end it, and where a reply of HMGET with these fields goes from place `at` on. What
-- somebody spoilt of it is made good, so that an end is always possible.
local OF_END = {'about', 'entry', 'bytes'}
local function note_end(one, f, at)
  one.about, one.entry, one.bytes = about_of(f[at]), f[at + 1], whole(f[at + 2])
  if not one.about then one.about = about_again(job_key(one.id)) end
  if not is_entry(one.entry) then one.entry = find_entry(one.id, one.about) end
  if not one.bytes then one.bytes = #(redis.call('HGET', job_key(one.id), 'payload') or '') end
  return one
end

-- What is stored of a job that ends: result, state and expiries. An empty payload is as good as none and costs no write
-- of its own.
local function store_end(one)
  local job, ttl = job_key(one.id), one.about.ttl
  if one.announced then
    redis.call('HSET', job, 'state', one.state, 'payload', '', 'entry', one.announced)
  else
    redis.call('HSET', job, 'state', one.state, 'payload', '')
    redis.call('SET', base .. 'result:' .. one.id, one.result, unpack(ttl ~= '0' and {'PX', ttl} or {}))
  end
  if one.marked then redis.call('HDEL', job, 'cancel') end
  if ttl ~= '0' then
    redis.call('PEXPIRE', job, ttl)
    if one.has_log then redis.call('PEXPIRE', base .. 'log:' .. one.id, ttl) end
  end
end

-- Announce jobs of a bulk run that end, with their results; each learns the entry that has its own. The run's stream lasts
-- as long as any of them is kept.
local function announce(run, ended)
  local stream, said, longest = base .. 'done:' .. run, {}, 0
  for i, one in ipairs(ended) do
    said[2 * i - 1], said[2 * i] = one.id, one.result
    if one.about.kept_ms > longest then longest = one.about.kept_ms end
  end
  local lasts = redis.call('PTTL', stream) -- -2: there is none, -1: it stays
  for from, to in pieces(said) do
    local entry = redis.call('XADD', stream, '*', unpack(said, from, to))
    for i = (from + 1) / 2, to / 2 do ended[i].announced = entry end
  end
  if longest == math.huge then
    redis.call('PERSIST', stream)
  elseif lasts ~= -1 and lasts < longest then
    redis.call('PEXPIRE', stream, longest)
  end
end

-- A list of the table, made when it is first asked for.
local function list_in(lists, name)
  if not lists[name] then lists[name] = {} end
  return lists[name]
end

-- End jobs, each {id, state, result, marked: for cancelling, has_log} and what `note_end` notes: entries, leases, counts
-- and what `store_end` stores, all or nothing. What they have in common is done once for all of them, which takes half of
-- the time of ending one by one.
local function end_jobs(ended)
  local ids, bytes, lines, runs = {}, 0, {}, {}
  for i, one in ipairs(ended) do
    local about = one.about
    ids[i], bytes = one.id, bytes + one.bytes
    if one.entry ~= '' then table.insert(list_in(lines, about), one.entry) end
    if about.run ~= '' then table.insert(list_in(runs, about.run), one) end
  end
  redis.call('HINCRBY', meta, 'entries', -#ids)
  redis.call('HINCRBY', meta, 'bytes', 0 - bytes) -- Lua writes minus nothing as -0, which is no number to servers
  for run, of_run in pairs(runs) do announce(run, of_run) end
  for _, one in ipairs(ended) do store_end(one) end
  for _, times in ipairs({leases, delayed, deadlines}) do
    if redis.call('EXISTS', times) == 1 then
      for from, to in pieces(ids) do redis.call('ZREM', times, unpack(ids, from, to)) end
    end
  end
  for about, entries in pairs(lines) do drop_entries(about.priority, about.tenant, entries) end
end

-- A write that changes nothing, for scripts whose first one may be one that is never refused. Returns the number of picks.
local function refused_first() return redis.call('HINCRBY', meta, 'picks', 0) end

-- How much the queue holds and may hold; the bounds given hold where its meta sets none.
local function room_of(most_entries, most_bytes)
  local m = redis.call('HMGET', meta, 'entries', 'bytes', 'max_entries', 'max_bytes')
  return {entries = number_of(m[1]), bytes = number_of(m[2]), max_entries = number_of(m[3], tonumber(most_entries)),
    max_bytes = number_of(m[4], tonumber(most_bytes))}
end

-- Count a payload of that size as held; or, where there is no room for it, the reply that says so.
local function no_room(room, size)
  if room.entries + 1 > room.max_entries or room.bytes + size > room.max_bytes then
    return {'full', room.entries, room.bytes, room.max_entries, room.max_bytes}
  end
  room.entries, room.bytes = room.entries + 1, room.bytes + size
end

-- A job as submit and dead_requeue are given it, from ARGV[i] on.
local JOB_ARGS = 5
local function asked_at(i)
  return {id = ARGV[i], payload = ARGV[i + 1], digest = ARGV[i + 2], about = ARGV[i + 3], times = ARGV[i + 4]}
end

-- When a job may start and when it must have ended (ms, 0 at once, 0 never), of its "not_before,delay,deadline,deadline_in".
local function times_of(text, now)
  if text == '' then return 0, 0 end
  local not_before, delay, deadline, deadline_in = string.match(text, '^(%d+),(%d+),(%d+),(%d+)$')
  if deadline_in ~= '0' then deadline = now + deadline_in end
  return math.max(tonumber(not_before), now + delay), tonumber(deadline)
end

-- Store a job and have it wait: in its stream, or for its time. The fields that every job has in one write: each costs
-- 2.5 us.
local function begin_life(one, now)
  local id, entry = one.id, ''
  local due, deadline = times_of(one.times, now)
  if deadline > 0 then redis.call('ZADD', deadlines, deadline, id) end
  if due > now then
    redis.call('ZADD', delayed, due, id)
  else
    entry, due = put_in_line(id, about_of(one.about)), 0
  end
  local job, attempt = job_key(id), one.attempt or 0
  redis.call('HSET', job, 'payload', one.payload, 'digest', one.digest, 'about', one.about, 'state', 'queued', 'entry', entry,
    'bytes', #one.payload)
  if attempt ~= 0 then redis.call('HSET', job, 'attempt', attempt) end
  if due ~= 0 then redis.call('HSET', job, 'not_before', due) end
  if deadline ~= 0 then redis.call('HSET', job, 'deadline', deadline) end
end

-- Count jobs, each as `asked_at` has it, and begin their lives. `attempt`: the last one of an earlier life.
local function begin_lives(jobs)
  local now, bytes = server_ms(), 0
  for _, one in ipairs(jobs) do bytes = bytes + #one.payload end
  redis.call('HINCRBY', meta, 'entries', #jobs)
  redis.call('HINCRBY', meta, 'bytes', bytes)
  for _, one in ipairs(jobs) do begin_life(one, now) end
  wake_hungry()
end
