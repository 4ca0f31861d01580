-- Cancel a slice of what waits in a queue, and of what runs if asked.
-- ARGV: base, priority ('' of any), tenant ('' of any), running (1 what runs too | 0), place ('' none: only say which
--       there are), cursor ('0' from the start)
-- Reply: without a place {place, ...}: 'delayed', 'leases' and '<priority>:<tenant>' of each stream with work; with one
--        {how many were cancelled, how many that run were marked for it, cursor to go on with ('' it is through)}
-- Again: what was cancelled has ended, what was marked is marked: neither is counted twice.
-- A job that runs is met in `leases` and in its stream, where those stand too that were leased since.
local priority, tenant, running, place, cursor = ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5], ARGV[6]
local MOST = 50 -- jobs looked at in one call, 0.1 to 0.2 ms each: a script holds up the whole server
local now = server_ms()

local function is_asked_for(its_priority, its_tenant)
  return (priority == '' or priority == its_priority) and (tenant == '' or tenant == its_tenant)
end

local function places()
  local found = {'delayed', 'leases'}
  for _, its_priority in ipairs({'high', 'normal', 'low'}) do
    for _, its_tenant in ipairs(redis.call('ZRANGE', base .. 'tenants:' .. its_priority, 0, -1)) do
      if is_asked_for(its_priority, its_tenant) then found[#found + 1] = its_priority .. ':' .. its_tenant end
    end
  end
  return found
end

-- Ids of the place's jobs behind the cursor, and the cursor behind them.
local function ids_of_set()
  local step, ids = redis.call('ZSCAN', base .. place, cursor, 'COUNT', MOST), {}
  for i = 1, #step[2], 2 do ids[#ids + 1] = step[2][i] end
  return ids, step[1] ~= '0' and step[1] or ''
end

local function ids_of_stream()
  local entries, ids = redis.call('XRANGE', base .. 'jobs:' .. place, '(' .. cursor, '+', 'COUNT', MOST), {}
  for _, entry in ipairs(entries) do ids[#ids + 1] = table_of(entry[2]).id end
  return ids, #entries == MOST and entries[MOST][1] or ''
end

local function is_marked(id) return redis.call('HGET', job_key(id), 'cancel') and lapses_at(id) > now end

local function is_wanted(id, known)
  if not known or TERMINAL[known.state] then return false end
  if known.state == 'running' and (not running or is_marked(id)) then return false end
  return is_asked_for(known.about.priority, known.about.tenant)
end

if place == '' then return places() end
local counts = {cancelled = 0, cancelling = 0}
local ids, behind
if place == 'delayed' or place == 'leases' then ids, behind = ids_of_set() else ids, behind = ids_of_stream() end
for _, id in ipairs(ids) do
  if events_read > MOST_EVENTS then
    behind = cursor -- the same again: what has ended by then is passed over
    break
  end
  if is_wanted(id, standing(id, now)) then
    local marked = redis.call('HGET', job_key(id), 'cancel')
    local outcome = cancel_now(id, 'cancelled as its queue was cleared', now)
    if outcome == 'cancelling' and marked then outcome = nil end -- left to a worker by an earlier call
    if counts[outcome or ''] then counts[outcome] = counts[outcome] + 1 end
  end
end
return {counts.cancelled, counts.cancelling, behind}
