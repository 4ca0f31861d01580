-- Log and publish a job's next events.
-- ARGV: base, id, attempt, seq of the first event, events...
-- Reply: {'ok' | 'cancel' | 'lost' | 'gap', events logged}
-- Again: events whose seq is logged are skipped, so nothing stands or is heard twice.
local id = ARGV[2]
local f = redis.call('HMGET', job_key(id), 'state', 'attempt', 'cancel')
if f[1] ~= 'running' or f[2] ~= ARGV[3] then return {'lost', 0} end
local events = {}
for i = 5, #ARGV do events[i - 4] = ARGV[i] end
local first = tonumber(ARGV[4])
local logged, whole = logged_before(id, first)
if not whole then return {'gap', logged} end
logged = push_events(id, logged, first, events)
return {f[3] and 'cancel' or 'ok', logged}
