-- End a job: unpublished events logged, result stored, entry acknowledged and deleted, completion announced.
-- ARGV: base, id, attempt, state, result, reason for the dead letter ('' none), seq of the first event, events...
-- Reply: 'ok' | 'lost' | 'gap'
-- Again: the attempt that ended the job is answered 'ok' once more; any other attempt 'lost'.
local id, attempt, state = ARGV[2], ARGV[3], ARGV[4]
local f = redis.call('HMGET', job_key(id), 'state', 'attempt')
if f[2] ~= attempt then return 'lost' end
if f[1] == state then return 'ok' end
if f[1] ~= 'running' then return 'lost' end
local events = {}
for i = 8, #ARGV do events[i - 7] = ARGV[i] end
local _, whole = append_events(id, tonumber(ARGV[7]), events)
if not whole then return 'gap' end
if ARGV[6] ~= '' then
  local known = redis.call('HMGET', job_key(id), 'payload', 'worker')
  redis.call('HSET', job_key(id), 'letter', redis.call('XADD', dead, '*', 'id', id, 'reason', ARGV[6], 'raw', known[1] or '',
    'attempt', attempt, 'worker', known[2]))
end
end_job(id, state, ARGV[5], server_ms())
return 'ok'
