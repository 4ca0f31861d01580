-- Log and publish the next events of jobs that a worker runs.
-- ARGV: base, worker, then for each job: id, attempt, seq of its first event, how many events, the events. No job stands
--       there twice.
-- Reply: for each {'ok' | 'cancel' | 'lost' | 'gap', events logged}
-- Again: events whose seq is logged are skipped, so nothing stands or is heard twice.
local worker = ARGV[2]

local function publish(id, attempt, first, events)
  local f = redis.pcall('HMGET', job_key(id), 'state', 'attempt', 'worker', 'cancel')
  if f[1] ~= 'running' or f[2] ~= attempt or f[3] ~= worker then return {'lost', 0} end
  local logged, whole = logged_before(id, first)
  if not whole then return {'gap', logged} end
  return {f[4] and 'cancel' or 'ok', push_events(id, logged, first, events)}
end

local replies, at = {}, 3
while at <= #ARGV do
  local last = at + 3 + tonumber(ARGV[at + 3])
  replies[#replies + 1] = publish(ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), args_from(at + 4, last))
  at = last + 1
end
return replies
