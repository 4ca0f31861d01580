-- End jobs that a worker runs: unpublished events logged and published, result stored, entry acknowledged and deleted, completion announced.
-- ARGV: base, worker, then for each job: id, attempt, state, result, reason for the dead letter ('' none), seq of the first
--       event (0: nobody streams it, and its result says all that its log would: the events are published alone), how many
--       events, the events. No job stands there twice.
-- Reply: for each 'ok' | 'lost' | 'gap'
-- Again: the lease (worker, attempt) that ended the job is answered 'ok' once more; any other 'lost'.
-- What is told without a log is told last: a server whose memory is full refuses the writes, and would not refuse that.
local worker = ARGV[2]
local replies, ended = {}, {}

-- The answer for one job; what ends now goes on the list, its events are logged if it has a log.
local function ending(one)
  local f = redis.pcall('HMGET', job_key(one.id), 'state', 'attempt', 'worker', 'cancel', unpack(OF_END))
  if f[2] ~= one.attempt or f[3] ~= worker then return 'lost' end
  if f[1] == one.state then return 'ok' end
  if f[1] ~= 'running' then return 'lost' end
  if one.first ~= '0' then
    local first = tonumber(one.first)
    local logged, whole = logged_before(one.id, first)
    if not whole then return 'gap' end
    push_events(one.id, logged, first, one.events)
    one.has_log = true
  end
  one.marked = f[4]
  ended[#ended + 1] = note_end(one, f, 5)
  return 'ok'
end

local function add_letter(id, attempt, reason)
  local payload = redis.call('HGET', job_key(id), 'payload')
  redis.call('HSET', job_key(id), 'letter', redis.call('XADD', dead, '*', 'id', id, 'reason', reason, 'raw', payload or '',
    'attempt', attempt, 'worker', worker))
end

local at = 3
while at <= #ARGV do
  local last = at + 6 + (ARGV[at + 6] == '1' and 1 or tonumber(ARGV[at + 6]))
  -- All fields that it will ever have: a table that outgrows its place is built anew.
  local one = {id = ARGV[at], attempt = ARGV[at + 1], state = ARGV[at + 2], result = ARGV[at + 3],
    reason = ARGV[at + 4], first = ARGV[at + 5], events = args_from(at + 7, last),
    about = false, entry = false, bytes = 0, marked = false, announced = false, has_log = false}
  replies[#replies + 1] = ending(one)
  at = last + 1
end
for _, one in ipairs(ended) do
  if one.reason ~= '' then add_letter(one.id, one.attempt, one.reason) end
end
if #ended > 0 then end_jobs(ended) end
for _, one in ipairs(ended) do
  if not one.has_log then tell(one.id, one.events) end
end
return replies
