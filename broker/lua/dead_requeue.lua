-- Give a dead job another life: without log, result, crashes and retries, under attempts that go on counting.
-- ARGV: base, max_entries, max_bytes, letter (its entry's id), then for each of its one job: as for submit; its run is
--       not used
-- Reply: {'queued'} | {'unknown'}: no such letter | {'alive', state}: the id has another life already | {'full', entries,
--        bytes, max_entries, max_bytes}
-- It is not of its bulk run any more, which has noted its end. Its history stands in its hash.
-- Again: the job knows the letter it came back from, and is left alone.
local letter, one = ARGV[4], asked_at(5)
local job = job_key(one.id)
local f = redis.pcall('HMGET', job, 'state', 'letter', 'requeued', 'history', 'attempt')
if f[3] == letter then return {'queued'} end
local entry = redis.call('XRANGE', dead, letter, letter)[1]
if not entry then return {'unknown'} end
if f[1] and (f[1] ~= 'dead' or f[2] ~= letter) then return {'alive', f[1]} end
local full = no_room(room_of(ARGV[2], ARGV[3]), #one.payload)
if full then return full end

local fields = table_of(entry[2])
local died = cjson.encode({letter = letter, reason = fields.reason, attempt = whole(fields.attempt) or 0,
  worker = fields.worker})
if f.err then redis.call('DEL', job) end -- no hash, so no job
redis.call('HSET', job, 'requeued', letter, 'history', (f[4] and f[4] .. '\n' or '') .. died)
redis.call('HDEL', job, 'letter', 'worker', 'started', 'crashes', 'not_before', 'deadline', 'retries')
redis.call('PERSIST', job)
redis.call('DEL', base .. 'log:' .. one.id, base .. 'result:' .. one.id)
local about = about_of(one.about)
one.about = table.concat({about.priority, about.tenant, '', about.ttl, about.max_retries}, ',')
one.attempt = whole(f[5]) or whole(fields.attempt) or 0
begin_lives({one})
redis.call('XDEL', dead, letter)
return {'queued'}
