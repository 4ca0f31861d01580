-- Store jobs and queue their entries, or have them wait for their time.
-- ARGV: base, max_entries, max_bytes (the bounds hold where the queue's meta sets none), then for each job: id, payload,
--       digest, priority, tenant, run ('' none), ttl (ms, 0 keep), not before (ms, server clock, 0 at once), delay (ms
--       from now), deadline (ms, server clock, 0 none), deadline in (ms from now, 0 none), max_retries ('' the default)
-- Reply: for each {'queued'} | {'same', state} | {'conflict', state} | {'full', entries, bytes, max_entries, max_bytes}.
--        From the first that finds no room on nothing is taken, and all of them are 'full'.
-- Again: the id and the payload's digest tell a repetition, which is answered 'same'.
local room = room_of(ARGV[2], ARGV[3])
local replies, taken, digests = {}, {}, {}

-- The answer for one job; what is taken goes on the list. One may stand twice in a call.
local function answer(one)
  local known = digests[one.id] and {digests[one.id], 'queued'} or redis.call('HMGET', job_key(one.id), 'digest', 'state')
  if known[1] then return {known[1] == one.digest and 'same' or 'conflict', known[2]} end
  local full = no_room(room, #one.payload)
  if full then return full end
  taken[#taken + 1], digests[one.id] = one, one.digest
  return {'queued'}
end

local full
for i = 4, #ARGV, JOB_ARGS do
  local reply = full or answer(asked_at(i))
  if reply[1] == 'full' then full = reply end
  replies[#replies + 1] = reply
end
if #taken > 0 then begin_lives(taken) end
return replies
