-- Delete ended jobs of a bulk run whose rows are durable elsewhere.
-- ARGV: base, run, then id, entry of the run's stream ('' not to be deleted) for each
-- Reply: how many jobs were deleted
-- A job that has not ended is left alone. The run's stream stays, even empty: it remembers its last id.
-- Again: they are gone, so the second call deletes none.
-- Many keys in one command: a write in a script costs about 2.5 us, most of it for the append-only file.
local MOST = 1000 -- keys in a command: unpack takes some 8,000
local forgotten = 0
local ids, entries = {}, {}

-- The jobs that have ended.
local function ended_of(asked)
  local ended = {}
  for _, id in ipairs(asked) do
    local state = redis.pcall('HGET', job_key(id), 'state') -- an error: it is no hash, so no job
    if type(state) ~= 'string' or TERMINAL[state] then ended[#ended + 1] = id end
  end
  return ended
end

local function flush()
  local jobs, rest = {}, {}
  for _, id in ipairs(ended_of(ids)) do
    jobs[#jobs + 1] = job_key(id)
    rest[#rest + 1] = base .. 'log:' .. id
    rest[#rest + 1] = base .. 'result:' .. id
  end
  if #jobs > 0 then
    forgotten = forgotten + redis.call('DEL', unpack(jobs))
    redis.call('DEL', unpack(rest))
  end
  if #entries > 0 then redis.call('XDEL', base .. 'done:' .. ARGV[2], unpack(entries)) end
  ids, entries = {}, {}
end

for i = 3, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
  if ARGV[i + 1] ~= '' then entries[#entries + 1] = ARGV[i + 1] end
  if #ids == MOST then flush() end
end
if #ids > 0 then flush() end
return forgotten
