-- Cancel a job. One that waits, or whose lease has lapsed, ends here; one that runs is marked, and its owner told.
-- ARGV: base, id
-- Reply: {'cancelled'} | {'cancelling'} | {'ended', state} | {'unknown'}
-- Again: a cancelled job has ended; the mark can be set twice.
local id = ARGV[2]
local state = redis.call('HGET', job_key(id), 'state')
if not state then return {'unknown'} end
if TERMINAL[state] then return {'ended', state} end
local now = server_ms()
if expire(id, now) then return {'ended', 'expired'} end
if state == 'queued' or tonumber(redis.call('ZSCORE', leases, id) or 0) <= now then
  cancel_unowned(id, 'cancelled while it waited', now)
  return {'cancelled'}
end
redis.call('HSET', job_key(id), 'cancel', 1)
redis.call('PUBLISH', base .. 'control', 'cancel:' .. id)
return {'cancelling'}
