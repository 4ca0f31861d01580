-- Hand leases back, so that others can take the jobs at once.
-- ARGV: base, worker, then id, attempt, crashed (0 | 1: its process died while it ran the job), retry in (ms, 0: it may
--       be taken at once; else it is tried again then, and counts as a retry) for each
-- Reply: how many were handed back
-- Again: a job handed back is no longer 'running' under that attempt, so the second call changes nothing.
local worker = ARGV[2]
local now = server_ms()
local released = 0
for i = 3, #ARGV, 4 do
  local id = ARGV[i]
  local job, retry_in = job_key(id), tonumber(ARGV[i + 3])
  local f = redis.pcall('HMGET', job, 'state', 'attempt', 'worker', 'cancel')
  local held = f[1] == 'running' and f[2] == ARGV[i + 1] and f[3] == worker
  if held and standing(id, now).state == 'running' then
    redis.call('HINCRBY', job, 'crashes', ARGV[i + 2])
    if not (f[4] and cancel_unowned(id, 'cancelled while it was handed over', now)) then
      redis.call('HSET', job, 'state', 'queued', 'worker', '')
      if retry_in > 0 and not f[4] then
        redis.call('HINCRBY', job, 'retries', 1)
        redis.call('ZREM', leases, id)
        redis.call('ZADD', delayed, now + retry_in, id)
      else
        redis.call('ZADD', leases, 0, id)
      end
      expire(id, now)
    end
    released = released + 1
  end
end
if released > 0 then redis.call('PUBLISH', base .. 'control', 'wake') end
return released
