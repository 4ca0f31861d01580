-- Put in front of every script. All keys of a queue share one hash tag, so they are built from its base here;
-- each script declares KEYS[1] = <base>meta, which places it on the queue's shard.
--
--   <base>meta             hash    fingerprint, entries, bytes, max_entries, max_bytes, picks, vt:<priority>,
--                                  paused, hungry (a worker found less than it asked for, and waits for a wake-up),
--                                  sweep (cursor of the heartbeats' search for stray jobs)
--   <base>job:<id>         hash    payload digest state attempt crashes worker priority tenant run ttl entry bytes
--                                  submitted started finished (ms, server clock) cancel
--   <base>jobs:<p>:<t>     stream  {id}; consumer group "workers"; deleted when empty
--   <base>tenants:<p>      zset    tenant -> virtual time, while it has undelivered entries
--   <base>leases           zset    id -> server time (ms) at which the lease lapses; 0 = handed back
--   <base>lease:<worker>   string  the last lease reply of a worker, so that it can be repeated; expires
--   <base>log:<id>         list    events, index = seq - 1
--   <base>tokens:<id>      channel the same events
--   <base>result:<id>      string  the result, JSON
--   <base>done:<run>       stream  {id, state}: completions of one bulk run
--   <base>dead             stream  {id, reason, raw}: dead letters
--   <base>workers          hash    worker -> "<server ms> <json>"
--   <base>control          channel wake, cancel:<id>
--
-- ARGV[1] is always the base.

local base = ARGV[1]
local meta = base .. 'meta'
local leases = base .. 'leases'
local GROUP = 'workers'
local TERMINAL = {succeeded = true, failed = true, cancelled = true, expired = true, dead = true}

-- The server's clock in ms; no client clock ever decides anything.
local function server_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function job_key(id) return base .. 'job:' .. id end
local function stream_key(priority, tenant) return base .. 'jobs:' .. priority .. ':' .. tenant end

-- Append events to the log and publish them. `first` is the seq of events[1]; what is logged already is skipped.
-- Returns the log's length, and false if the events would leave a gap.
local function append_events(id, first, events)
  local log = base .. 'log:' .. id
  local logged = redis.call('LLEN', log)
  if first > logged + 1 then return logged, false end
  for i = logged - first + 2, #events do
    redis.call('RPUSH', log, events[i])
    redis.call('PUBLISH', base .. 'tokens:' .. id, events[i])
    logged = logged + 1
  end
  return logged, true
end

-- Drop an entry for good. The stream goes with its last entry, and its tenant with the stream.
local function drop_entry(priority, tenant, entry)
  local stream = stream_key(priority, tenant)
  redis.pcall('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
  if redis.call('XLEN', stream) == 0 then
    redis.call('DEL', stream)
    redis.call('ZREM', base .. 'tenants:' .. priority, tenant)
  end
end

-- End a job: entry, lease, counts, result, expiries and the run's announcement, all or nothing.
local function end_job(id, state, result, now)
  local job = job_key(id)
  local f = redis.call('HMGET', job, 'priority', 'tenant', 'entry', 'bytes', 'ttl', 'run')
  drop_entry(f[1], f[2], f[3])
  redis.call('ZREM', leases, id)
  redis.call('HINCRBY', meta, 'entries', -1)
  redis.call('HINCRBY', meta, 'bytes', -tonumber(f[4]))
  redis.call('HSET', job, 'state', state, 'finished', now)
  redis.call('HDEL', job, 'payload', 'cancel')
  local ttl = tonumber(f[5])
  if ttl > 0 then
    redis.call('SET', base .. 'result:' .. id, result, 'PX', ttl)
    redis.call('PEXPIRE', job, ttl)
    redis.call('PEXPIRE', base .. 'log:' .. id, ttl)
  else
    redis.call('SET', base .. 'result:' .. id, result)
  end
  if f[6] and f[6] ~= '' then
    redis.call('XADD', base .. 'done:' .. f[6], '*', 'id', id, 'state', state)
  end
end

-- What earlier attempts logged of a job, as the JSON list of its choices. `reason`: how the unfinished ones ended.
-- Written by hand: cjson cannot write an empty list. Log-probabilities stay in the log.
local function logged_choices(id, reason)
  local choices, order = {}, {}
  for _, raw in ipairs(redis.call('LRANGE', base .. 'log:' .. id, 0, -1)) do
    local event = cjson.decode(raw)
    if event.type == 'token' then
      local choice = choices[event.choice]
      if not choice then
        choice = {text = {}, ids = {}, reason = reason}
        choices[event.choice] = choice
        order[#order + 1] = event.choice
      end
      table.insert(choice.text, event.text)
      for _, token in ipairs(event.token_ids) do table.insert(choice.ids, token) end
      choice.reason = event.finish_reason or choice.reason
      choice.stop = event.stop_reason or choice.stop
    end
  end
  table.sort(order)
  for i, index in ipairs(order) do
    local choice = choices[index]
    order[i] = string.format('{"index":%d,"text":%s,"token_ids":[%s],"finish_reason":%s%s}', index,
      cjson.encode(table.concat(choice.text)), table.concat(choice.ids, ','), cjson.encode(choice.reason),
      choice.stop and ',"stop_reason":' .. cjson.encode(choice.stop) or '')
  end
  return '[' .. table.concat(order, ',') .. ']'
end

-- Cancel a job that no worker holds, with a result and a terminal event made here. What is logged of it is kept.
local function cancel_unowned(id, message, now)
  local attempt = tonumber(redis.call('HGET', job_key(id), 'attempt'))
  local seq = redis.call('LLEN', base .. 'log:' .. id) + 1
  local result = cjson.encode({v = 1, id = id, state = 'cancelled', attempt = attempt, finished_at = now / 1000,
    error = {code = 'cancelled', message = message}})
  result = string.sub(result, 1, -2) .. ',"choices":' .. logged_choices(id, 'cancelled') .. '}'
  append_events(id, seq, {cjson.encode({type = 'cancelled', id = id, seq = seq, attempt = attempt,
    code = 'cancelled', message = message})})
  end_job(id, 'cancelled', result, now)
end
