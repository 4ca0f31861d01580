-- Note that a worker lives; forget workers not heard of for a long time; look for jobs that fell out of the queue, and
-- for those whose time has come or is over.
-- ARGV: base, worker, info (JSON), how old a heartbeat is forgotten (ms)
-- Reply: 'ok' | 'unknown': not noted, since the queue does not know the worker (it was emptied, or bound to another
--        model): it must register, and is told so until it has, should this reply be lost
-- Again: beating twice is beating once.
local now = server_ms()
local workers = base .. 'workers'

-- A job that neither a stream nor a lease holds would wait for ever: somebody trimmed or deleted a key. The counts
-- tell that there is one once no tenant has work; a scan, one piece a heartbeat, finds it and hands it back.
-- A whole scan that finds none while nothing is leased shows that the counts are wrong: job hashes were deleted.
local function sweep()
  local m = redis.call('HMGET', meta, 'entries', 'sweep')
  local leased = redis.call('ZCARD', leases) + redis.call('ZCARD', delayed)
  local tenants = base .. 'tenants:'
  if tonumber(m[1] or 0) <= leased
    or redis.call('EXISTS', tenants .. 'high', tenants .. 'normal', tenants .. 'low') > 0 then return end
  local step = redis.call('SCAN', m[2] or '0', 'MATCH', job_key('*'), 'COUNT', 1000)
  local cursor, found = step[1], 0
  for _, job in ipairs(step[2]) do
    local id, state = string.sub(job, #job_key('') + 1), redis.call('HGET', job, 'state')
    if state and not TERMINAL[state] and not redis.call('ZSCORE', leases, id)
      and not redis.call('ZSCORE', delayed, id) then
      if state == 'running' then
        -- Its owner may live where only the leases were lost: it has a minute to renew.
        redis.call('ZADD', leases, now + 60000, id)
      else
        redis.call('ZADD', delayed, redis.call('HGET', job, 'not_before') or 0, id)
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

local beats = redis.call('HGETALL', workers)
for i = 1, #beats, 2 do
  if tonumber(string.match(beats[i + 1], '^%d+')) < now - tonumber(ARGV[4]) then
    redis.call('HDEL', workers, beats[i])
  end
end
sweep()
release_due(now)
expire_overdue(now)
if redis.call('HEXISTS', workers, ARGV[2]) == 0 then return 'unknown' end
redis.call('HSET', workers, ARGV[2], string.format('%.0f', now) .. ' ' .. ARGV[3])
return 'ok'
