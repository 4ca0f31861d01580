-- Put behind common.lua and unowned.lua in front of every script: what a job's hash says, and jobs whose time has come or is over.

-- Clear away what is left of a job whose hash somebody deleted. Its log has no expiry.
local function lose(id, raw)
  redis.call('XADD', dead, '*', 'id', id, 'reason', 'lost_payload', 'raw', raw)
  for _, times in ipairs({leases, delayed, deadlines}) do redis.call('ZREM', times, id) end
  redis.call('DEL', base .. 'log:' .. id)
end

-- End a job that somebody spoilt by hand, as dead: its hash says nothing that a script could go by.
local function end_spoilt(id, why, now)
  local job = job_key(id)
  local f = redis.pcall('HMGET', job, 'payload', 'digest', 'attempt', 'bytes')
  local payload, attempt = f[1] or '', whole(f[3]) or 0
  local letter = redis.call('XADD', dead, '*', 'id', id, 'reason', payload == '' and 'lost_payload' or 'spoilt_job',
    'raw', payload, 'attempt', attempt, 'worker', '')
  if f.err then redis.call('DEL', job) end
  redis.call('HSET', job, 'letter', letter, 'attempt', attempt)
  if not f[2] or payload == '' then -- never submitted, or over already: it is not counted
    redis.call('HINCRBY', meta, 'entries', 1)
    redis.call('HINCRBY', meta, 'bytes', whole(f[4]) or #payload)
  end
  end_unowned(id, 'dead', 'spoilt_job', 'somebody changed it by hand: ' .. why, now)
end

-- What scripts go by of a job: the fields asked of its hash, the numbers, of which a missing one is 0, behind the texts.
local STANDING = {'state', 'about', 'entry', 'bytes', 'attempt', 'crashes', 'retries', 'not_before', 'deadline', 'started'}
local FIRST_NUMBER = 4

-- What a reply of HMGET with these fields says from place `at` on, as a table, and which field says nothing.
local function read_standing(f, at)
  local known = {state = f[at], about = about_of(f[at + 1]), entry = f[at + 2]}
  local wrong = known.state ~= 'queued' and known.state ~= 'running' and 'state' or not known.about and 'about'
    or not is_entry(known.entry) and 'entry' or not f[at + 3] and 'bytes'
  for i = FIRST_NUMBER, #STANDING do
    local text = f[at + i - 1]
    known[STANDING[i]] = text and whole(text) or 0
    if text and not whole(text) then wrong = wrong or STANDING[i] end
  end
  return known, wrong
end

-- The same of the job of that id: nil without one, its state alone where it has ended. One that was spoilt ends here, so
-- that it can stop nobody.
local function standing_of(id, f, at, now)
  if TERMINAL[f[at]] then return {state = f[at]} end
  if not f.err and not f[at] and redis.call('EXISTS', job_key(id)) == 0 then return nil end
  local known, wrong = read_standing(f, at)
  if not f.err and not wrong then return known end
  end_spoilt(id, f.err and 'something else is in the place of its hash' or 'its field ' .. wrong .. ' cannot be read', now)
  return {state = 'dead'}
end

local function standing(id, now)
  return standing_of(id, redis.pcall('HMGET', job_key(id), unpack(STANDING)), 1, now)
end

-- When the lease of a job lapses; 0 without one.
local function lapses_at(id) return tonumber(redis.call('ZSCORE', leases, id) or 0) end

-- End a job past its deadline, unless a worker holds it, which stops it then, or has to read its log. Returns how it
-- stands, as `standing` does.
local function expire(id, now)
  local known = standing(id, now)
  if not known or TERMINAL[known.state] or known.deadline == 0 or known.deadline > now then return known end
  if known.state == 'running' and lapses_at(id) > now then return known end
  local message = known.state == 'running' and 'its deadline passed after its worker was lost'
    or 'its deadline passed while it waited'
  return end_unowned(id, 'expired', 'deadline_exceeded', message, now) and {state = 'expired'} or known
end

-- Cancel a job: end one that waits or whose lease has lapsed, mark one that runs and tell its owner, or the one that will
-- be granted it as its log is long. Returns what came of it, and the state of one that had ended.
local function cancel_now(id, message, now)
  local known = expire(id, now)
  if not known then return 'unknown' end
  if TERMINAL[known.state] then return 'ended', known.state end
  if (known.state == 'queued' or lapses_at(id) <= now) and cancel_unowned(id, message, now) then return 'cancelled' end
  redis.call('HSET', job_key(id), 'cancel', 1)
  redis.call('PUBLISH', base .. 'control', 'cancel:' .. id)
  return 'cancelling'
end

-- Jobs whose time has come: one without an entry gets it, one that is tried again can be leased at once. Returns whether
-- there may be more.
local MOST_DUE = 500 -- in one call: a script holds up the whole server
local function release_due(now)
  local due = redis.call('ZRANGE', delayed, '-inf', now, 'BYSCORE', 'LIMIT', 0, MOST_DUE)
  for _, id in ipairs(due) do
    local known = standing(id, now)
    if not known then
      lose(id, '')
    elseif known.state == 'queued' and known.entry == '' then
      redis.call('HSET', job_key(id), 'entry', put_in_line(id, known.about))
    elseif known.state == 'queued' then
      redis.call('ZADD', leases, 0, id)
    end
    redis.call('ZREM', delayed, id)
  end
  if #due > 0 then wake_hungry() end
  return #due == MOST_DUE
end

-- End what waits past its deadline. What runs is its owner's to stop: it is looked at again when its lease lapses. Returns
-- whether there may be more.
local MOST_EXPIRED = 100
local function expire_overdue(now)
  local due = redis.call('ZRANGE', deadlines, '-inf', now, 'BYSCORE', 'LIMIT', 0, MOST_EXPIRED)
  for _, id in ipairs(due) do
    if events_read > MOST_EVENTS then return true end
    local known = expire(id, now)
    local lapses = known and known.state == 'running' and lapses_at(id) or 0
    if lapses > now then
      redis.call('ZADD', deadlines, lapses, id)
    else
      redis.call('ZREM', deadlines, id)
    end
  end
  return #due == MOST_EXPIRED
end
