-- Cancel a job. One that waits ends here; one that runs is marked, and its owner told.
-- ARGV: base, id
-- Reply: {'cancelled'} | {'cancelling'} | {'ended', state} | {'unknown'}
-- Again: a cancelled job has ended; the mark can be set twice.
local id = ARGV[2]
local state = redis.call('HGET', job_key(id), 'state')
if not state then return {'unknown'} end
if TERMINAL[state] then return {'ended', state} end
if state == 'queued' then
  end_unowned(id, 'cancelled', 'cancelled', 'cancelled', 'cancelled before it started', server_ms())
  return {'cancelled'}
end
redis.call('HSET', job_key(id), 'cancel', 1)
redis.call('PUBLISH', base .. 'control', 'cancel:' .. id)
return {'cancelling'}
