-- Store a job and queue its entry, or have it wait for its time.
-- ARGV: base, id, payload, digest, priority, tenant, run ('' none), ttl (ms, 0 keep), max_entries, max_bytes
--       (the bounds hold where the queue's meta sets none), not before (ms, server clock, 0 at once), delay (ms from
--       now), deadline (ms, server clock, 0 none), deadline in (ms from now, 0 none), max_retries ('' the default)
-- Reply: {'queued'} | {'same', state} | {'conflict', state} | {'full', entries, bytes, max_entries, max_bytes}
-- Again: the id and the payload's digest tell a repetition, which is answered 'same'.
local id, payload, digest = ARGV[2], ARGV[3], ARGV[4]
local known = redis.call('HMGET', job_key(id), 'digest', 'state')
if known[1] then
  return {known[1] == digest and 'same' or 'conflict', known[2]}
end
local full = no_room(#payload, ARGV[9], ARGV[10])
if full then return full end
redis.call('HSET', job_key(id), 'payload', payload, 'digest', digest, 'attempt', 0, 'priority', ARGV[5],
  'tenant', ARGV[6], 'run', ARGV[7], 'ttl', ARGV[8])
begin_life(id, #payload, {not_before = ARGV[11], delay = ARGV[12], deadline = ARGV[13], deadline_in = ARGV[14],
  max_retries = ARGV[15]})
return {'queued'}
