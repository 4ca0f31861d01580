-- Store a job and queue its entry.
-- ARGV: base, id, payload, digest, priority, tenant, run ('' none), ttl (ms, 0 keep), max_entries, max_bytes
--       (the bounds hold where the queue's meta sets none)
-- Reply: {'queued'} | {'same', state} | {'conflict', state} | {'full', entries, bytes, max_entries, max_bytes}
-- Again: the id and the payload's digest tell a repetition, which is answered 'same'.
local id, payload, digest, priority, tenant, run = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local job = job_key(id)

local known = redis.call('HMGET', job, 'digest', 'state')
if known[1] then
  return {known[1] == digest and 'same' or 'conflict', known[2]}
end

local m = redis.call('HMGET', meta, 'entries', 'bytes', 'max_entries', 'max_bytes', 'vt:' .. priority)
local entries, bytes = tonumber(m[1] or 0), tonumber(m[2] or 0)
local max_entries, max_bytes = tonumber(m[3] or ARGV[9]), tonumber(m[4] or ARGV[10])
if entries + 1 > max_entries or bytes + #payload > max_bytes then
  return {'full', entries, bytes, max_entries, max_bytes}
end

local stream = stream_key(priority, tenant)
if redis.call('EXISTS', stream) == 0 then
  redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
end
local entry = redis.call('XADD', stream, '*', 'id', id)
redis.call('HSET', job, 'payload', payload, 'digest', digest, 'state', 'queued', 'attempt', 0, 'crashes', 0,
  'priority', priority, 'tenant', tenant, 'run', run, 'ttl', ARGV[8], 'entry', entry, 'bytes', #payload,
  'submitted', server_ms())
redis.call('HINCRBY', meta, 'entries', 1)
redis.call('HINCRBY', meta, 'bytes', #payload)
-- A tenant that comes (back) starts one behind the virtual time of the last pick (start-time fair queueing): it
-- neither waits for the others' past nor spends its own idle time as credit. Not level with it: tenants that submit
-- one job at a time and come back after each would then always be first.
redis.call('ZADD', base .. 'tenants:' .. priority, 'NX', (m[5] or 0) + 1, tenant)
-- Only a worker that found too little is told: at 10,000 submits a second nobody wants 10,000 wake-ups.
if redis.call('HDEL', meta, 'hungry') == 1 then redis.call('PUBLISH', base .. 'control', 'wake') end
return {'queued'}
