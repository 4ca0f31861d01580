-- Note that a worker lives; forget workers not heard of for a long time; look for jobs that fell out of the queue, and
-- for those whose time has come or is over.
-- ARGV: base, worker, info (JSON), how old a heartbeat is forgotten (ms)
-- Reply: 'ok' | 'unknown': not noted, since the queue does not know the worker (it was emptied, or bound to another
--        model): it must register, and is told so until it has, should this reply be lost
-- Again: beating twice is beating once.
local now = server_ms()
local workers = base .. 'workers'

-- Drop the oldest entries of a stream whose jobs are gone, or have another one. Those of jobs that ran are among them,
-- which nobody would read again.
local function sweep_stream(stream)
  local priority, tenant = string.match(string.sub(stream, #base + 1), '^jobs:([^:]*):(.*)$')
  local stray = {}
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', 1000)) do
    local id = table_of(entry[2]).id
    local known = id and standing(id, now)
    if not known or known.entry ~= entry[1] then stray[#stray + 1] = entry[1] end
    if id and not known then redis.call('DEL', base .. 'log:' .. id) end
  end
  if #stray > 0 then drop_entries(priority, tenant, stray) end
end

-- A job that neither a stream nor a lease holds would wait for ever: somebody trimmed or deleted a key. The counts
-- tell that there is one once no tenant has work; a scan, one piece a heartbeat, finds it and hands it back.
-- A whole scan that finds none while nothing is leased shows that the counts are wrong: job hashes were deleted.
local function sweep()
  local m = redis.call('HMGET', meta, 'entries', 'sweep', 'bytes')
  local leased = redis.call('ZCARD', leases) + redis.call('ZCARD', delayed)
  local entries, tenants = number_of(m[1]), base .. 'tenants:'
  if entries < 0 or entries == 0 and number_of(m[3]) ~= 0 then -- nothing is held, or far more: a count was spoilt
    redis.call('HSET', meta, 'entries', leased, 'bytes', 0)
  end
  if entries <= leased
    or redis.call('EXISTS', tenants .. 'high', tenants .. 'normal', tenants .. 'low') > 0 then return end
  local step = redis.call('SCAN', whole(m[2]) and m[2] or '0', 'MATCH', base .. 'job*', 'COUNT', 1000)
  local cursor, found = step[1], 0
  for _, key in ipairs(step[2]) do
    local kind, id = string.match(string.sub(key, #base + 1), '^(jobs?):(.*)$')
    if kind == 'jobs' then sweep_stream(key) end
    local known = kind == 'job' and standing(id, now)
    if known and not TERMINAL[known.state] and not redis.call('ZSCORE', leases, id)
      and not redis.call('ZSCORE', delayed, id) then
      if known.state == 'running' then
        -- Its owner may live where only the leases were lost: it has a minute to renew.
        redis.call('ZADD', leases, now + 60000, id)
      else
        redis.call('ZADD', delayed, known.not_before, id)
      end
      found = found + 1
    end
  end
  if found > 0 then
    cursor = '0'
    redis.call('PUBLISH', base .. 'control', 'wake')
  elseif cursor == '0' and leased == 0 then
    redis.call('HSET', meta, 'entries', 0, 'bytes', 0)
  end
  redis.call('HSET', meta, 'sweep', cursor)
end

-- Forget workers not heard of for a long time. All heartbeats of a queue are read for that, so one in a while does it.
local FORGET_EVERY_MS = 30000
local function forget_workers()
  local last = number_of(redis.call('HGET', meta, 'forgotten'))
  if last <= now and now < last + FORGET_EVERY_MS then return end
  redis.call('HSET', meta, 'forgotten', string.format('%.0f', now))
  local oldest = now - tonumber(ARGV[4])
  for _, times in ipairs({workers, base .. 'loading'}) do
    local beats = redis.call('HGETALL', times)
    for i = 1, #beats, 2 do
      if (tonumber(string.match(beats[i + 1], '^%d+')) or 0) < oldest then
        redis.call('HDEL', times, beats[i])
        forget_consumer(beats[i])
      end
    end
  end
end

refused_first()
forget_workers()
sweep()
release_due(now)
expire_overdue(now)
if redis.call('HEXISTS', workers, ARGV[2]) == 0 then return 'unknown' end
redis.call('HSET', workers, ARGV[2], string.format('%.0f', now) .. ' ' .. ARGV[3])
return 'ok'
