-- Store jobs and queue their entries, or have them wait for their time.
-- ARGV: base, max_entries, max_bytes (the bounds hold where the queue's meta sets none), then for each job: id, payload,
--       digest, about ("priority,tenant,run,ttl,max_retries": run may be empty, ttl in ms, 0 keep), times ('' none, else
--       "not_before,delay,deadline,deadline_in", each ms, 0 none: the server's clock, from now, its clock, from now)
-- Reply: for each {'queued'} | {'same', state} | {'conflict', state} | {'full', entries, bytes, max_entries, max_bytes}.
--        From the first that finds no room on nothing is taken, and all of them are 'full'.
-- Again: the id and the payload's digest tell a repetition, which is answered 'same'.
local room = room_of(ARGV[2], ARGV[3])
local replies, taken, digests = {}, {}, {}

-- Whether any of the jobs is stored already, or a log is left of one whose hash somebody deleted. Mostly there is none,
-- and one question for all is less than one for each.
local function any_known(asked)
  local theirs = {}
  for _, one in ipairs(asked) do theirs[#theirs + 1], theirs[#theirs + 2] = job_key(one.id), base .. 'log:' .. one.id end
  for from, to in pieces(theirs) do
    if redis.call('EXISTS', unpack(theirs, from, to)) > 0 then return true end
  end
  return false
end

local asked = {}
for i = 4, #ARGV, JOB_ARGS do asked[#asked + 1] = asked_at(i) end
local all_new = not any_known(asked)

local QUEUED = {'queued'}
-- The answer for one job; what is taken goes on the list. One may stand twice in a call.
local function answer(one)
  local digest, state = digests[one.id], 'queued'
  if not digest and not all_new then
    local known = redis.pcall('HMGET', job_key(one.id), 'digest', 'state')
    if known.err then redis.call('DEL', job_key(one.id)) end -- no hash, so no job
    digest, state = known[1], known[2]
  end
  if digest then return {digest == one.digest and 'same' or 'conflict', state} end
  local full = no_room(room, #one.payload)
  if full then return full end
  taken[#taken + 1], digests[one.id] = one, one.digest
  return QUEUED
end

local full
for _, one in ipairs(asked) do
  local reply = full or answer(one)
  if reply[1] == 'full' then full = reply end
  replies[#replies + 1] = reply
end
if #taken > 0 then begin_lives(taken) end
if not all_new then
  for _, one in ipairs(taken) do redis.call('DEL', base .. 'log:' .. one.id) end
end
return replies
