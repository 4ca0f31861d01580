-- Give a dead job another life: without log, result, crashes and retries, under attempts that go on counting.
-- ARGV: base, id, payload, digest, priority, tenant, run (not used), ttl, max_entries, max_bytes, not before, delay,
--       deadline, deadline in, max_retries (all of them as for submit), letter (its entry's id)
-- Reply: {'queued'} | {'unknown'}: no such letter | {'alive', state}: the id has another life already | {'full', entries,
--        bytes, max_entries, max_bytes}
-- It is not of its bulk run any more, which has noted its end. Its history stands in its hash.
-- Again: the job knows the letter it came back from, and is left alone.
local id, payload, letter = ARGV[2], ARGV[3], ARGV[16]
local job = job_key(id)
local f = redis.call('HMGET', job, 'state', 'letter', 'requeued', 'history', 'attempt')
if f[3] == letter then return {'queued'} end
local entry = redis.call('XRANGE', dead, letter, letter)[1]
if not entry then return {'unknown'} end
if f[1] and (f[1] ~= 'dead' or f[2] ~= letter) then return {'alive', f[1]} end
local full = no_room(#payload, ARGV[9], ARGV[10])
if full then return full end

local fields = table_of(entry[2])
local died = cjson.encode({letter = letter, reason = fields.reason, attempt = tonumber(fields.attempt or 0),
  worker = fields.worker})
redis.call('HSET', job, 'payload', payload, 'digest', ARGV[4], 'attempt', f[5] or fields.attempt or 0,
  'priority', ARGV[5], 'tenant', ARGV[6], 'run', '', 'ttl', ARGV[8], 'requeued', letter,
  'history', (f[4] and f[4] .. '\n' or '') .. died)
redis.call('HDEL', job, 'letter', 'worker', 'started', 'finished', 'not_before', 'deadline', 'retries', 'max_retries')
redis.call('PERSIST', job)
redis.call('DEL', base .. 'log:' .. id, base .. 'result:' .. id)
begin_life(id, #payload, {not_before = ARGV[11], delay = ARGV[12], deadline = ARGV[13], deadline_in = ARGV[14],
  max_retries = ARGV[15]})
redis.call('XDEL', dead, letter)
return {'queued'}
